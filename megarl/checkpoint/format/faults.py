"""Named points of a save at which a test kills the process. They do nothing unless MEGARL_KILL_AT is set.

`MEGARL_KILL_AT=shard,manifest` kills the process that first reaches each of these points. Every kill leaves a file with
the point's name in the directory MEGARL_KILL_MARKS. The file shows the test that the point was reached, and lets a
restarted rank pass it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

# In this order: between two shards of a rank, before torch's .metadata, before the manifest, before the rename that
# completes the checkpoint, in the middle of a deletion by retention.
POINTS = ("shard", "metadata", "manifest", "rename", "retention")


def reached(point: str) -> None:
    """Kill this process (SIGKILL) if MEGARL_KILL_AT names `point` and no process has been killed there yet.

    Raises ValueError if there is no such point.
    """
    if point not in POINTS:
        raise ValueError(f"unknown fault point {point!r}; the points are {', '.join(POINTS)}")
    if point not in os.environ.get("MEGARL_KILL_AT", "").split(","):
        return
    try:
        (Path(os.environ["MEGARL_KILL_MARKS"]) / point).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
