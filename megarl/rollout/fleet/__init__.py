"""All engines of a run: routing of requests, and lost, drained and added engines."""
