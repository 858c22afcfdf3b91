"""The training loop and the parts of its session."""
