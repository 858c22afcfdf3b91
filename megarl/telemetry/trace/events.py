"""Records events of this process from anywhere, like a logger: `record`, `span` and `mark`.

A process opens one writer (`writer.py`) at its start. Without one, as in library use or most tests, nothing is
recorded, and a call costs a comparison.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from megarl.common.values import MIB
from megarl.telemetry.trace.kinds import FAULTS, UndeclaredEvent
from megarl.telemetry.trace.lines import EventPlace, Scalar
from megarl.telemetry.trace.writer import EventWriter

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # bound of the last write of a process
MAX_CHARACTERS = 500  # of the text of a fault

_writer: EventWriter | None = None


def open_events(mib: float, run_dir: Path, process: str) -> None:
    """Start writing the events of this process: at most `mib` MiB (`telemetry.events_mib`), none if it is 0."""
    global _writer
    close_events()
    if mib:
        _writer = EventWriter(run_dir, process, int(mib * MIB))
        _writer.start()


def close_events() -> None:
    """Write waiting events, within `CLOSE_S`, and record nothing more."""
    global _writer
    writer, _writer = _writer, None
    if writer is not None and not writer.close(CLOSE_S):
        logger.warning("the last events were not written within %.0f s", CLOSE_S)


def lost_events() -> int:
    """Return how many events this process has failed to write."""
    return 0 if _writer is None else _writer.lost


def record(
    name: str, begin: float, end: float | None = None, *, args: Mapping[str, Scalar] | None = None,
    **place: Unpack[EventPlace],
) -> None:  # fmt: skip
    """Record an event; see `EventWriter.record`."""
    if _writer is not None:
        _writer.record(name, begin, end, args=args, **place)


def mark(name: str, *, args: Mapping[str, Scalar] | None = None, **place: Unpack[EventPlace]) -> None:
    """Record a mark at the current time."""
    record(name, time.monotonic(), args=args, **place)


@contextmanager
def span(name: str, **place: Unpack[EventPlace]) -> Iterator[None]:
    """Record the time of the block, also if it raises."""
    begin = time.monotonic()
    try:
        yield
    finally:
        record(name, begin, time.monotonic(), **place)


def fault(kind: str, text: str, *, rule: str = "", **place: Unpack[EventPlace]) -> None:
    """Record a loss or failure. `kind`: one of `FAULTS`. `rule`: the monitor's rule of an alarm.

    Raises UndeclaredEvent.
    """
    _of_fault("fault", kind, text, rule, place)


def recovery(kind: str, text: str, *, rule: str = "", **place: Unpack[EventPlace]) -> None:
    """Record that the run continues after a fault of this kind, replica and rule. Raises UndeclaredEvent."""
    _of_fault("recovery", kind, text, rule, place)


def _of_fault(name: str, kind: str, text: str, rule: str, place: EventPlace) -> None:
    if kind not in FAULTS:
        raise UndeclaredEvent(f"unknown kind of fault {kind!r}; kinds are {', '.join(FAULTS)}")
    args: dict[str, Scalar] = {"kind": kind, "text": text[:MAX_CHARACTERS]}
    record(name, time.monotonic(), args=args | ({"rule": rule} if rule else {}), **place)
