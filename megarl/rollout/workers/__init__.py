"""Agent workers: processes alongside the pool that run the loops of prompt groups for the controller."""
