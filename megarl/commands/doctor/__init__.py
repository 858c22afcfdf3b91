"""`megarl doctor`: tells whether a run could start on this machine, and with `--nodes` how fast nodes communicate.

With `--run` it lists the listening sockets of a living run and what protects them.
"""
