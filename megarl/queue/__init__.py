"""The data plane: the trajectory, its way through TransferQueue, dumps and samples for people to read."""
