"""Declared metrics, and how a step's values are collected."""
