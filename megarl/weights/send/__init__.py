"""The trainer's side of a weight sync."""
