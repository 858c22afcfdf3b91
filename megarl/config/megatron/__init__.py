"""Fields of Megatron-Core's own configs."""
