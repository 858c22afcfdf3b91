"""Secrets, signed values, and bounds on what is unpickled."""
