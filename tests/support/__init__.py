"""What several test modules need, or what the processes import that tests start."""
