"""Config files, overrides and command-line options."""
