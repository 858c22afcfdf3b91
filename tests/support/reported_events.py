"""Event files for `megarl report`, in the form that `megarl.telemetry.event_lines` declares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from megarl.telemetry.event_lines import FOLDER, SCHEMA, EventFileName, EventLine, Header
from tests.support.reported_runs import START


def write_events(run_dir: Path, stream: Any, events: list[EventLine], process: str = "controller") -> None:
    """Write one file of events, whose times are in microseconds from `START`."""
    (run_dir / FOLDER).mkdir(exist_ok=True)
    header = Header(SCHEMA, process, "host", 1, int(START * 1e9), 0)
    lines = [msgspec.json.encode(each) for each in (header, *events)]
    EventFileName(process, 1_795_600_000_000, stream, 0).path(run_dir).write_bytes(b"\n".join(lines) + b"\n")


def slow(step: int, seconds: float, *, group: int = 1, **parts: float) -> EventLine:
    """A slow trajectory; `parts`: seconds by cause."""
    args: dict[str, Any] = {"turns": 2, "tokens": 500} | {f"{cause}_s": value for cause, value in parts.items()}
    return EventLine("slow_trajectory", 0, int(seconds * 1e6), step, None, group, 0, 1, 1, args)


def write_slow_trajectories(run_dir: Path) -> None:
    """Two slow trajectories, one of which waited for a tool."""
    events = [slow(3, 20.0, decode=12.0, tool=6.0, queue=2.0), slow(4, 30.0, group=2, tool=25.0, decode=5.0)]
    write_events(run_dir, "steps", events)
