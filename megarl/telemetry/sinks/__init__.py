"""Outputs of metrics: files, services, the terminal."""
