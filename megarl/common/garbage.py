"""Python's garbage collection in processes that live as long as a run."""

from __future__ import annotations

import gc

# Requests and groups in flight are many objects that stay for long: after every 700 new ones, Python's default, they
# would be visited again and again, which took a third of the controller's time with 10,000 trajectories in flight.
_YOUNG_OBJECTS = 50_000


def exempt_present_objects() -> None:
    """Take all objects that exist now out of later collections. To be called when a process has started.

    They are mostly imported modules, and stay until the end. A collection that visits them stops a process for 0.3 s.
    """
    gc.collect()
    gc.freeze()


def collect_rarely() -> None:
    """Make collections rare in a process with many small objects in flight. Not for one whose tensors are in cycles."""
    gc.set_threshold(_YOUNG_OBJECTS)
