"""Files of RUN_DIR and the private directory of a run."""
