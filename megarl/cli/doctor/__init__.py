"""`megarl doctor`: reports whether a run could start on this machine, and with `--nodes` how fast nodes communicate."""
