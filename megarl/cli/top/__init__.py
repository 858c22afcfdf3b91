"""`megarl top`: a run in a terminal, read from its files."""
