"""Agent workers: processes that run the loops of prompt groups for the controller."""
