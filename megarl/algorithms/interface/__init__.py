"""The inputs and results of losses and advantages, and their registry."""
