"""Decides which groups may start, and counts exactly how each ends. Pure."""
