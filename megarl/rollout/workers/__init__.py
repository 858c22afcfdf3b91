"""Agent workers: processes beside the pool that run the loops of prompt groups for the controller."""
