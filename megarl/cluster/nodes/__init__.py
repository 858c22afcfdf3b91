"""The job on its nodes: which node runs what, the batch scripts, and the agent that runs a node's share."""
