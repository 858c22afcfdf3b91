"""Many small messages share few calls; each counts once."""
