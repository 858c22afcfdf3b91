"""The page: its parts, plots and HTML."""
