"""Held-out evaluation: its metrics, its harness and its tables."""
