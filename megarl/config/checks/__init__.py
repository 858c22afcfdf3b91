"""Checks of a config before anything starts."""
