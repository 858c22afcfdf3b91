"""The process group of a weight sync, and its store."""
