"""The data plane: trajectories, their transport through TransferQueue, dumps, and samples for people to read."""
