"""The plan of a run: ranks, layout, devices, memory per GPU."""
