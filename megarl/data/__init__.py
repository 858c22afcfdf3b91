"""Prompts: files, order, tokens."""
