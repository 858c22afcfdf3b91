"""The files of a run as the report reads them."""
