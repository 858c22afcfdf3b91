"""The job on its nodes: the topology, the batch scripts, and the agent that runs a node's share."""
