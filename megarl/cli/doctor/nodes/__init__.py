"""`megarl doctor --nodes`: the paths between the nodes of a job."""
