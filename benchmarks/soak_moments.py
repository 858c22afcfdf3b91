"""Waits for the moment in which a fault is to hit an engine: while it works, while it is idle, or in a publication.

An engine is caught in a publication by stopping it (SIGSTOP) as soon as the controller has announced a version: the
engines are about to be given it, and the publication cannot end before this one goes on.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_processes import cpu_seconds, is_stopped, send  # noqa: E402

WAIT_S = {"busy": 10.0, "idle": 30.0, "in-sync": 60.0}  # for the moment, before the fault comes all the same
# What is told of each moment, if it has not come in time and if it has.
TOLD = {
    "busy": ("it was idle", "it had requests"),
    "idle": ("it worked", "it was idle"),
    "in-sync": ("NOT in a publication", "in a publication"),
}
WATCH_S = 0.1  # half of the time for which an engine must not compute to be idle
GLANCE_S = 0.05  # for which one must compute to be busy: an engine that ends its last responses does not
BUSY_SHARE = 0.4  # of that time
IDLE_SHARE = 0.05  # of that time, in which an idle engine may compute
STOPPED_S = 2.0  # for an engine to stop, on a machine that has much to do
HELD_S = 0.1  # after which an engine that was stopped in a publication is seen to hold it up
POLL_S = 0.005  # shorter than a publication
TAIL_BYTES = 1 << 16  # of the schedule, which grows with the run


def catch(moment: str, engine: psutil.Process, run_dir: Path, over: Callable[[], bool]) -> bool:
    """Wait until an engine does what `moment` names; False if it does not in time, or the run is `over()`.

    An engine that is caught in a publication is stopped.
    """
    looks = {
        "busy": lambda engine: _generates(engine, run_dir),
        "idle": _rests,
        "in-sync": lambda engine: _stops_in_sync(engine, run_dir),
    }
    deadline = time.monotonic() + WAIT_S[moment]
    while time.monotonic() < deadline and not over():
        if looks[moment](engine):
            return True
    return False


def _generates(engine: psutil.Process, run_dir: Path) -> bool:
    """Tell whether an engine computes, and not in a publication, in which it loads weights."""
    return _computes(engine) and version_being_published(run_dir) is None


def _computes(engine: psutil.Process) -> bool:
    """Tell whether an engine computes right now: in a short time, since a response takes a fraction of a second."""
    before = _scheduled_s(engine)
    time.sleep(GLANCE_S)
    return _scheduled_s(engine) - before > GLANCE_S * BUSY_SHARE


def _scheduled_s(process: psutil.Process) -> float:
    """Return the seconds for which the threads of a process have had a core, to a microsecond; 0 if it has ended."""
    nanoseconds = 0
    for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread that has ended
            nanoseconds += int(path.read_text().split()[0])
    return nanoseconds / 1e9


def _rests(engine: psutil.Process) -> bool:
    before = cpu_seconds(engine)
    time.sleep(2 * WATCH_S)
    return cpu_seconds(engine) - before <= 2 * WATCH_S * IDLE_SHARE


def _stops_in_sync(engine: psutil.Process, run_dir: Path) -> bool:
    """Stop an engine if a version is being published; let it go on if the publication has ended nevertheless."""
    version = version_being_published(run_dir)
    if version is None:
        time.sleep(POLL_S)
        return False
    send([engine], signal.SIGSTOP)
    deadline = time.monotonic() + STOPPED_S
    while not is_stopped([engine]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(HELD_S)
    if version_being_published(run_dir) == version and is_stopped([engine]):
        return True
    send([engine], signal.SIGCONT)
    return False


def version_being_published(run_dir: Path) -> int | None:
    """Return the version that the schedule says is announced and not yet served; None if there is none."""
    try:
        with (run_dir / "schedule.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:  # not begun
        return None
    for line in reversed(lines[:-1]):  # what follows the last line break is being written
        if b'"announce"' in line:
            return int(json.loads(line)["version"])
        if b'"set_version"' in line or b'"begin"' in line:
            return None
    return None
