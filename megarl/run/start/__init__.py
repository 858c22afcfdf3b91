"""The start of a trainer rank: command line, checks, claim, exit."""
