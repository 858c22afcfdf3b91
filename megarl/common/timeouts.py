"""Margins between the timeouts of nested waits.

The inner wait knows the cause of a delay, so it has to end first and report it.
"""

from __future__ import annotations

# Seconds that the other ranks wait longer than the timeout of the work that rank 0 does for them.
GRACE_S = 60.0
