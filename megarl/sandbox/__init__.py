"""Locked-down processes for code that a model wrote."""
