"""What losses and advantages are given, what they return, and their registry."""
