"""Tasksets that verifiers imports: the folder is on the path of the environment server."""
