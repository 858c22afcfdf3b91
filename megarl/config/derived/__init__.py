"""Values that follow from a config."""
