"""Small messages share few Ray calls; each message counts once."""
