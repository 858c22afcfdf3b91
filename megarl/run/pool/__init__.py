"""The trainer's view of the rollout pool: batches, rows, commits."""
