"""Megatron-Core modules of a model on a rank."""
