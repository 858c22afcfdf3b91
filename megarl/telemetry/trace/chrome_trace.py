"""Converts the events of a run to the Trace Event Format, which Perfetto and chrome://tracing open.

Each process of the run is a process of the trace, with a thread for each of its tracks. Samples overlap, so they share
threads of the track `samples`, each with its turns, tools and reward inside. Arrows lead from a publication to the
loads of its version. The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from megarl.telemetry.trace.files import RunEvent, read_events
from megarl.telemetry.trace.lines import CONTROLLER, rank_process

# Places spans on lines so that the spans of a line are nested or follow each other, as trace viewers need.
#
# All times are whole microseconds.

T = TypeVar("T")

ROUNDING_US = 5  # a span may end this much after its enclosing one, for example because of rounding


@dataclass(frozen=True)
class Placed(Generic[T]):
    """A span on line number `line` (from 0). `end` may be cut to fit."""

    line: int
    begin: int
    end: int
    item: T


def share_lines(spans: Sequence[tuple[int, int, Hashable, T]]) -> list[Placed[T]]:
    """Place spans (begin, end, unit, item); the spans of a unit share a line if they nest there.

    Overlapping units are on different lines; uses as few lines as possible.
    """
    last: dict[Hashable, int] = {}  # when a unit ends
    for _, end, unit, _ in spans:
        last[unit] = max(end, last.get(unit, end))
    free: list[int] = []  # lines, the lowest first
    busy: list[tuple[int, int]] = []  # (end, line)
    # The lines of each unit, each with the ends of its open spans, the innermost last.
    lines: dict[Hashable, list[tuple[int, list[int]]]] = {unit: [] for unit in last}
    placed = []
    for begin, end, unit, item in sorted(spans, key=lambda span: (span[0], -span[1])):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        fits = ((line, fit) for line, open_ in lines[unit] if (fit := _take(open_, begin, end)) is not None)
        if (found := next(fits, None)) is None:
            line = heapq.heappop(free) if free else len(free) + len(busy)
            heapq.heappush(busy, (last[unit], line))
            lines[unit].append((line, [end]))
            found = line, end
        placed.append(Placed(found[0], begin, found[1], item))
    return placed


def _take(open_: list[int], begin: int, end: int) -> int | None:
    """Add a span to a line if it fits, and return its end. `open_`: the ends of the line's earlier spans."""
    while open_ and open_[-1] <= begin:
        open_.pop()
    if open_ and end > open_[-1] + ROUNDING_US:
        return None
    open_.append(min(end, open_[-1]) if open_ else end)
    return open_[-1]


SAMPLES, SLOWEST = "samples", "slowest samples"
TRACKS = (
    "train", "next batch", "weight sync calls", "checkpoint", "evaluation", "engine", "weights", "batches", SAMPLES,
    SLOWEST, "load", "faults",
)  # fmt: skip
THREADS_PER_TRACK = 100_000  # a thread id combines the numbers of track and line
_INDEX = re.compile(r"\d+$")

TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class TraceWindow:
    """The part of a run to show: the steps `first` to `last`, and other events from `begin` to `end` (Unix time)."""

    first: int = 0
    last: float = math.inf
    begin: float = -math.inf
    end: float = math.inf

    @classmethod
    def of_steps(cls, run_dir: Path, first: int | None, last: int | None) -> TraceWindow:
        """Return the window of these steps, both included; None is open. Its times are those of trainer rank 0.

        Raises ValueError if none of the steps has an event.
        """
        if first is None and last is None:
            return cls()
        low, high = first or 0, math.inf if last is None else last
        spans = [
            each
            for each in read_events(run_dir, {"step"})
            if each.process == rank_process(0) and each.step is not None and low <= each.step <= high
        ]
        if not spans:
            raise ValueError(f"{run_dir}: no events of the steps {low} to {high}")
        begin = min(each.begin for each in spans) if first is not None else -math.inf
        end = max(each.end for each in spans) if last is not None else math.inf
        return cls(low, high, begin, end)

    def shows(self, event: RunEvent) -> bool:
        """Return whether an event is shown."""
        if event.step is not None:
            return self.first <= event.step <= self.last
        return event.end >= self.begin and event.begin < self.end


def trace_events(run_dir: Path, window: TraceWindow | None = None) -> Iterator[TraceEvent]:
    """Yield the events of a run in the Trace Event Format; times are microseconds since the first event.

    Keeps the events of one process in memory at a time. Raises FileNotFoundError without a run directory.
    """
    window = window or TraceWindow()
    origin = min((each.begin for each in read_events(run_dir) if window.shows(each)), default=0.0)
    flows = _Flows()
    numbers: dict[str, int] = {}
    for process, group in itertools.groupby(read_events(run_dir), key=lambda each: each.process):
        shown = [each for each in group if window.shows(each)]
        if shown:
            pid = numbers.setdefault(process, _process_number(process))
            yield from _ProcessTrace(process, pid, shown, origin).events(flows)
    yield from flows.arrows()


def _process_number(process: str) -> int:
    """Return the number of a process in the trace: ranks first, then the controller, workers and replicas."""
    found = _INDEX.search(process)
    index = int(found.group()) if found else 0
    role = process[: found.start()] if found else process
    block = {"trainer-rank-": 1, CONTROLLER: 2, "worker-": 3, "replica-": 4}.get(role, 5)
    return block * 1_000_000 + index


class _ProcessTrace:
    """Converts the events of one process of the run."""

    def __init__(self, process: str, pid: int, events: Sequence[RunEvent], origin: float) -> None:
        self._process, self._pid, self._events, self._origin = process, pid, events, origin

    def events(self, flows: _Flows) -> Iterator[TraceEvent]:
        """Yield names, spans, marks and counters; record in `flows` the spans that arrows join."""
        hosts = ", ".join(sorted({each.host for each in self._events}))
        yield self._named("process_name", 0, {"name": self._process.replace("-", " ")})
        yield self._named("process_labels", 0, {"labels": hosts})
        yield self._named("process_sort_index", 0, {"sort_index": self._pid})
        tracks: dict[str, list[RunEvent]] = {}
        for event in self._events:
            tracks.setdefault(_track(event), []).append(event)
        for track in sorted(tracks, key=TRACKS.index):
            yield from self._of_track(track, tracks[track], flows)

    def _of_track(self, track: str, events: Sequence[RunEvent], flows: _Flows) -> Iterator[TraceEvent]:
        spans = [(*self._times(each), _unit(track, each), each) for each in events if each.kind.shape == "span"]
        placed = share_lines(spans)
        for line in range(1 + max((each.line for each in placed), default=0)):
            name = track if not line else f"{track} ({line + 1})"
            tid = self._tid(track, line)
            yield self._named("thread_name", tid, {"name": name})
            yield self._named("thread_sort_index", tid, {"sort_index": tid})
        for each in placed:
            yield self._span(track, each)
            flows.add(each.item, self._pid, self._tid(track, each.line), each.begin)
        for event in events:
            if event.kind.shape != "span":
                yield self._point(track, event)

    def _times(self, event: RunEvent) -> tuple[int, int]:
        begin = round((event.begin - self._origin) * 1e6)
        return begin, begin + round(event.seconds * 1e6)

    def _tid(self, track: str, line: int) -> int:
        return (TRACKS.index(track) + 1) * THREADS_PER_TRACK + line

    def _named(self, name: str, tid: int, args: Mapping[str, str | int]) -> TraceEvent:
        return {"ph": "M", "name": name, "pid": self._pid, "tid": tid, "args": args}

    def _span(self, track: str, placed: Placed[RunEvent]) -> TraceEvent:
        event = placed.item
        return {
            "ph": "X", "name": _name(event), "cat": _category(event), "ts": placed.begin,
            "dur": placed.end - placed.begin, "pid": self._pid, "tid": self._tid(track, placed.line),
            "args": _arguments(event),
        }  # fmt: skip

    def _point(self, track: str, event: RunEvent) -> TraceEvent:
        begin, _ = self._times(event)
        common = {"name": _name(event), "cat": _category(event), "ts": begin, "pid": self._pid}
        if event.kind.shape == "counter":
            return {"ph": "C", **common, "args": dict(event.args)}
        return {"ph": "i", "s": "p", **common, "tid": self._tid(track, 0), "args": _arguments(event)}


def _track(event: RunEvent) -> str:
    if event.kind.track:
        return event.kind.track
    return SLOWEST if event.name == "slow_trajectory" else SAMPLES


def _unit(track: str, event: RunEvent) -> object:
    """Return the unit whose spans share a line: the sample, or the whole track."""
    return (event.group, event.sample) if track in (SAMPLES, SLOWEST) else track


def _name(event: RunEvent) -> str:
    """Return the name in the trace, with a trajectory's sample, a tool's name or a fault's kind."""
    if event.name in ("trajectory", "slow_trajectory"):
        return f"trajectory {event.group}:{event.sample}"
    if event.name in ("fault", "recovery"):
        return f"{event.name}: {event.args.get('kind')}"
    return f"tool {event.args.get('tool')}" if event.name == "tool" else event.name


def _category(event: RunEvent) -> str:
    return "rolled_back" if event.rolled_back else event.kind.stream


def _arguments(event: RunEvent) -> dict[str, object]:
    numbers = {
        "step": event.step, "version": event.version, "group": event.group, "sample": event.sample,
        "replica": event.replica,
        "rolled_back": True if event.rolled_back else None,
    }  # fmt: skip
    return {**{name: value for name, value in numbers.items() if value is not None}, **event.args}


class _Flows:
    """The arrows from publications to the loads of their weights, collected process by process."""

    def __init__(self) -> None:
        self._from: dict[int, TraceEvent] = {}
        self._to: list[tuple[int, TraceEvent]] = []

    def add(self, event: RunEvent, pid: int, tid: int, at: int) -> None:
        """Keep the place of a span if an arrow may begin or end there."""
        if event.version is None or event.rolled_back:
            return
        place = {"name": "weights", "cat": "flow", "pid": pid, "tid": tid, "ts": at}
        if event.name == "publication":
            self._from[event.version] = place
        elif event.name == "load_weights":
            self._to.append((event.version, place))

    def arrows(self) -> Iterator[TraceEvent]:
        """Yield both ends of each arrow."""
        for number, (version, end) in enumerate(self._to, start=1):
            begin = self._from.get(version)
            if begin is not None and begin["ts"] <= end["ts"]:
                yield {"ph": "s", "id": number, **begin}
                yield {"ph": "f", "bp": "e", "id": number, **end}
