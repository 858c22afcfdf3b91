"""Reads the files of a run for the report."""
