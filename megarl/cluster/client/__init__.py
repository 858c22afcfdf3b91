"""The trainer's side of the pool."""
