"""Which groups may start, and exact counts of how each ends. Pure."""
