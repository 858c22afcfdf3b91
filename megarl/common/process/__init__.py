"""Processes: start, identity, messages, output, memory."""
