"""Tells how long an engine took to start, by the events of its replica: until it joined a publication."""

from __future__ import annotations

import json
from pathlib import Path


def start_seconds(run_dir: Path, pid: int, created: float) -> float:
    """Return the seconds from `created` until the replica of process `pid` joined; 0 if its events do not tell.

    `created`: seconds since the epoch. An engine that starts beside training may be ready before that.
    """
    for path in sorted((run_dir / "events").glob("replica-*.steps.*.jsonl")):
        header, *events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if header["pid"] != pid:
            continue
        for event in events:
            if event["n"] == "join_group":
                since_header = event["t"] / 1e6 - header["monotonic_ns"] / 1e9
                return float(header["wall_ns"] / 1e9 + since_header - created)
    return 0.0
