"""All engines of a run: which one works on what; lost, drained and added ones."""
