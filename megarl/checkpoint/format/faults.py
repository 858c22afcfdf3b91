"""Named points of a save at which a test kills the process. Without MEGARL_KILL_AT in the environment they do nothing.

`MEGARL_KILL_AT=shard,manifest` kills the process that first comes by each of these points. Every kill leaves a file of
the point's name in the directory MEGARL_KILL_MARKS, so that a test knows it was reached and a restarted rank passes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Between two shards of a rank, before torch's .metadata, before the manifest, before the rename that completes the
# checkpoint, in the middle of a deletion by retention.
POINTS = ("shard", "metadata", "manifest", "rename", "retention")


def reached(point: str) -> None:
    """SIGKILL this process if the environment asks for it here and no process has been killed here yet."""
    if point not in POINTS:
        raise ValueError(f"unknown fault point {point!r}; points are {', '.join(POINTS)}")
    if point not in os.environ.get("MEGARL_KILL_AT", "").split(","):
        return
    try:
        (Path(os.environ["MEGARL_KILL_MARKS"]) / point).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
