"""Prompts: reading data files, choosing the next prompt, and encoding prompts as token ids."""
