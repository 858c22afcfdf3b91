"""Trainer ranks among themselves: control messages and signs of life."""
