"""Hugging Face files: configs, weights in, weights out."""
