"""Helpers of several test modules, and modules for the processes that tests start."""
