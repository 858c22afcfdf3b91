"""The lines of event files, JSON with short keys, and the names of these files.

Each process appends to its own files, RUN_DIR/events/PROCESS.START.STREAM.NUMBER.jsonl. START is the Unix time in
milliseconds at which the process opened its events; NUMBER counts the parts of a stream. The first line of each file is
a `Header`, all others are `EventLine`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypedDict, cast

import msgspec

from megarl.telemetry.trace.kinds import STREAMS, EventStream

FOLDER = "events"
CONTROLLER = "controller"  # the rollout controller's name in event files
SCHEMA = 1
_NAME = re.compile(rf"([A-Za-z0-9_-]+)\.(\d{{13}})\.({'|'.join(STREAMS)})\.(\d{{6}})\.jsonl")

Scalar = str | int | float


def rank_process(rank: int) -> str:
    """Return the name of a trainer rank in event files."""
    return f"trainer-rank-{rank}"


def replica_process(index: int) -> str:
    """Return the name of a replica in event files."""
    return f"replica-{index}"


def worker_process(index: int) -> str:
    """Return the name of an agent worker in event files."""
    return f"worker-{index}"


class EventPlace(TypedDict, total=False):
    """The step, version, group, sample and replica of an event, as fields of its line."""

    step: int | None
    version: int | None
    group: int | None
    sample: int | None
    replica: int | None


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a file: its process and clocks.

    `wall_ns`: Unix time in nanoseconds when the monotonic clock of the process showed `monotonic_ns`. Both are read
    when the file begins, so a later jump of the wall clock changes no order inside it.
    """

    schema: int
    process: str
    host: str
    pid: int
    wall_ns: int
    monotonic_ns: int

    def unix(self, at_us: int) -> float:
        """Return the Unix time in seconds of a monotonic time in microseconds."""
        return (self.wall_ns + at_us * 1000 - self.monotonic_ns) / 1e9


class EventLine(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    gc=False,
    rename={
        "name": "n", "at": "t", "us": "d", "step": "s", "version": "v", "group": "g", "sample": "i", "replica": "r",
        "args": "a",
    },
):  # fmt: skip
    """One event. `at`: monotonic time of its begin in microseconds. `us`: its duration in microseconds.

    `step`: as in metrics.jsonl, from 1.
    """

    name: str
    at: int
    us: int = 0
    step: int | None = None
    version: int | None = None
    group: int | None = None
    sample: int | None = None
    replica: int | None = None
    args: Mapping[str, Scalar] | None = None


class EventFileName(NamedTuple):
    """The parts of an event file's name; sorting by them sorts the files of a process and stream by time."""

    process: str
    start_ms: int
    stream: EventStream
    number: int

    def path(self, run_dir: Path) -> Path:
        """Return the file's path."""
        name = f"{self.process}.{self.start_ms:013d}.{self.stream}.{self.number:06d}.jsonl"
        return run_dir / FOLDER / name


def parse_name(name: str) -> EventFileName | None:
    """Return the parts of a file name; None if it is not the name of an event file."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    process, start, stream, number = found.groups()
    return EventFileName(process, int(start), cast("EventStream", stream), int(number))
