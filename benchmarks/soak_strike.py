"""Hits processes of a run by signals: kills them, stops them for a time, or slows them down."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_happened import Happened  # noqa: E402
from soak_processes import CRAWL, DUTY, cpu_seconds, ended, hold, send, throttle  # noqa: E402


def strike(
    event: Happened,
    hit: Sequence[psutil.Process],
    *,
    over: Callable[[], bool],
    works: psutil.Process,
) -> bool:
    """Send the fault's signals; note how long a process was stopped. False if there was none to be hit.

    `over()`: the run, or the process that is stopped, has ended. `works`: the process that uses the core.
    """
    fault = event.fault
    if fault.kind.action in ("kill", "damage"):
        there = not ended(hit[:1])
        send(hit if fault.kind.target == "job" else hit[:1], signal.SIGKILL)
        return there
    used, begun = cpu_seconds(works), time.monotonic()
    if fault.kind.action in ("slow", "crawl"):
        stopped = throttle(hit, fault.seconds, over, DUTY if fault.kind.action == "slow" else CRAWL)
    else:
        stopped = hold(hit, fault.seconds, over)
    lasted, used = time.monotonic() - begun, cpu_seconds(works) - used
    event.notes.append(f"stopped for {stopped:.1f} of {lasted:.1f} s, {max(used, 0.0):.1f} s of its core used")
    return stopped > 0.0
