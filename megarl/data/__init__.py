"""Prompts: reading data files, choosing the next prompt, encoding demonstrations."""
