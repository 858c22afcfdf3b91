"""Reads the events of a run, live or ended: `read_events` for all events, `EventTail` for new ones.

    for event in read_events(run_dir, names={"fault", "recovery"}):
        print(event.begin, event.process, event.args["kind"], event.args["text"])

Name the events for speed: faults, saves and evaluations (`rare`), phases and publications (`steps`) and single requests
(`details`) are in separate files, and only needed files are opened. Events come file by file, in each by their end;
sort them by `begin` if the order between processes matters.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megarl.common.rundir.json_lines import JsonLines
from megarl.telemetry.trace.kinds import KINDS, EventKind, streams_of
from megarl.telemetry.trace.lines import FOLDER, SCHEMA, EventFileName, EventLine, Header, Scalar, parse_name

ROLLED_BACK = "rolled_back"

_HEADER = msgspec.json.Decoder(Header)
_LINE = msgspec.json.Decoder(EventLine)
_NAME_AT = len(b'{"n":"')  # of a line, whose first field is the name
_MARKS = frozenset([ROLLED_BACK.encode()])


class RunEvent(msgspec.Struct, frozen=True, gc=False):
    """One event of a run. `begin`: Unix time in seconds by the clock of `host`; `seconds`: its duration, 0 for a mark.

    `step`: as in metrics.jsonl, from 1. `rolled_back`: a resume discarded the work.
    """

    process: str  # trainer-rank-R, replica-I, worker-I or controller
    host: str
    name: str
    begin: float
    seconds: float
    step: int | None
    version: int | None
    group: int | None
    sample: int | None
    replica: int | None
    args: Mapping[str, Scalar]
    rolled_back: bool

    @property
    def end(self) -> float:
        """Unix time of its end, in seconds."""
        return self.begin + self.seconds

    @property
    def kind(self) -> EventKind:
        """Its declaration."""
        return KINDS[self.name]


@dataclass(frozen=True)
class Rollback:
    """One resume: at Unix time `at` the run returned to the end of `step`, which it had reached at `since`."""

    at: float
    step: int
    since: float

    def discards(self, begin: float, step: int | None) -> bool:
        """Return whether the resume discarded an event that began at `begin`, of `step` if not None."""
        if begin >= self.at:
            return False
        return begin >= self.since if step is None else step > self.step


def read_events(
    run_dir: Path, names: Collection[str] | None = None, *, since: float | None = None
) -> Iterator[RunEvent]:
    """Yield the events of these names, or all events. `since`: only those that end at that Unix time or later.

    Skips incomplete lines. Raises FileNotFoundError if `run_dir` is not a directory, UndeclaredEvent for an unknown
    name. A run without events yields nothing.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"there is no run directory {run_dir}")
    yield from EventTail(run_dir, names).poll(since=since)


class EventTail:
    """Yields the new events of a run since the last `poll`; for readers of a live run.

    `rolled_back` reflects the resumes on disk when an event is read.
    """

    def __init__(self, run_dir: Path, names: Collection[str] | None = None) -> None:
        """`names`: names of events, None for all. Raises UndeclaredEvent."""
        self._run_dir = run_dir
        self._streams = streams_of(names)
        self._wanted = frozenset(name.encode() for name in (KINDS if names is None else names))
        self._files: dict[EventFileName, _OpenPart] = {}
        self._marks: dict[EventFileName, _OpenPart] = {}
        self.rollbacks: list[Rollback] = []

    def poll(self, *, since: float | None = None) -> Iterator[RunEvent]:
        """Yield new events. `since`: skip events that ended before that Unix time."""
        there = list(event_files(self._run_dir))
        self._read_rollbacks([name for name in there if name.stream == "rare"])
        for gone in self._files.keys() - set(there):
            del self._files[gone]
        for name in there:
            if name.stream in self._streams:
                yield from self._events(name, since)

    def _read_rollbacks(self, files: Iterable[EventFileName]) -> None:
        for name in files:
            part = self._marks.setdefault(name, _OpenPart())
            for header, line in part.new_lines(name.path(self._run_dir), _MARKS):
                if line.step is not None:
                    at = header.unix(line.at)
                    since = float((line.args or {}).get("since", at))
                    self.rollbacks.append(Rollback(at, line.step, since))

    def _events(self, name: EventFileName, since: float | None) -> Iterator[RunEvent]:
        part, path = self._files.setdefault(name, _OpenPart()), name.path(self._run_dir)
        if since is not None and _untouched(path, since):
            return
        for header, line in part.new_lines(path, self._wanted):
            begin, seconds = header.unix(line.at), line.us / 1e6
            if since is not None and begin + seconds < since:
                continue
            discarded = any(each.discards(begin, line.step) for each in self.rollbacks)
            yield RunEvent(
                header.process, header.host, line.name, begin, seconds, line.step, line.version, line.group,
                line.sample, line.replica, line.args or {}, discarded and line.name != ROLLED_BACK,
            )  # fmt: skip


def event_files(run_dir: Path) -> list[EventFileName]:
    """Return the event files of a run, for each process and stream in the order of writing."""
    try:
        names = os.listdir(run_dir / FOLDER)
    except FileNotFoundError:
        return []
    return sorted(found for name in names if (found := parse_name(name)) is not None)


class _OpenPart(JsonLines):
    """An event file being read, with its header once that is complete."""

    header: Header | None = None

    def new_lines(self, path: Path, wanted: Set[bytes]) -> Iterator[tuple[Header, EventLine]]:
        """Yield the new complete lines with events of these names, if the schema is known."""
        try:
            file = path.open("rb")
        except FileNotFoundError:  # a live run deletes its oldest files
            return
        with file:
            for raw in self.lines(file):
                if self.header is None:
                    self.header = self.decode(raw, _HEADER)
                    continue
                if self.header.schema != SCHEMA:
                    return
                name = raw[_NAME_AT : raw.find(b'"', _NAME_AT)]
                if name in wanted and (line := self.decode(raw, _LINE)) is not None:
                    yield self.header, line


def _untouched(path: Path, since: float) -> bool:
    """Return whether a file was last written before `since`, by the clock of the file server."""
    try:
        return path.stat().st_mtime < since
    except FileNotFoundError:
        return True
