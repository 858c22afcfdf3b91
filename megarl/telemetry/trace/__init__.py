"""Events of a run: written, read, and shown as a trace."""
