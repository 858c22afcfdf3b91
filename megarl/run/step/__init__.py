"""One training step: its plan, log-probs, update and metrics."""
