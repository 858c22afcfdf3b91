"""Agent loops: how one sample becomes a trajectory."""
