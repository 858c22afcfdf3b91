"""The events of a replica: the times in which its engine had requests, its load, its parts in publications."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megarl.rollout.engine.engine_load import EngineLoad
from megarl.telemetry.trace import events

GAP_S = 0.1  # breaks of an engine that are not told of
LONGEST_S = 60.0  # of a span, so that readers of a living run see it
LOAD_S = 10.0  # between two records of the load


@dataclass(frozen=True)
class BusySpan:
    """A time in which an engine had requests, with the most of them; in seconds of the clock that steps are told by."""

    begin: float
    end: float
    running: int
    waiting: int


class BusySpans:
    """Joins the steps of an engine to spans. Pure: each step is told with its time and load."""

    def __init__(self) -> None:
        self._span: BusySpan | None = None
        self._idle = True  # whether no request was left after the last step

    def step(self, now: float, load: EngineLoad) -> BusySpan | None:
        """Take note of a step; return the span that ended before it, if it does not belong to that."""
        busy = load.running + load.waiting > 0
        span, ended = self._span, None
        if span is not None and ((self._idle and now - span.end > GAP_S) or now - span.begin > LONGEST_S):
            span, ended = None, span
        if span is not None:
            self._span = BusySpan(
                span.begin, now if busy or not self._idle else span.end,
                max(span.running, load.running), max(span.waiting, load.waiting),
            )  # fmt: skip
        else:
            begin = ended.end if ended is not None and not self._idle else now
            self._span = BusySpan(begin, now, load.running, load.waiting) if busy else None
        self._idle = not busy
        return ended

    def take(self) -> BusySpan | None:
        """Return the present span, and begin another one with the next step."""
        span, self._span, self._idle = self._span, None, True
        return span


class ReplicaActivity:
    """Records the events of one replica. Its methods are called where things happen, in the actor's event loop."""

    def __init__(self, index: int, now: Callable[[], float] = time.monotonic) -> None:
        self._index, self._now = index, now
        self._busy = BusySpans()
        self._load_at = float("-inf")
        self._paused: float | None = None
        self._weights: float | None = None

    def step(self, now: float, load: EngineLoad) -> None:
        """Take note of an engine step at `now`."""
        if (ended := self._busy.step(now, load)) is not None:
            self._record_busy(ended)
        if now - self._load_at >= LOAD_S:
            self._load_at = now
            events.record(
                "load", now, replica=self._index,
                args={"running": load.running, "waiting": load.waiting, "kv_usage": round(load.kv_usage, 4)},
            )  # fmt: skip

    def pause(self) -> None:
        """The replica pauses; it may be paused already, by a publication that is repeated."""
        self._end_busy()
        self._paused = self._now() if self._paused is None else self._paused

    def resume(self, version: str | None) -> None:
        """The replica generates again, with weights of that label."""
        begin, self._paused = self._paused, None
        if begin is not None:
            self._record("paused", begin, version)

    def begin_weights(self) -> None:
        """The replica begins to receive weights."""
        self._weights = self._now()

    def end_weights(self, version: str) -> None:
        """The weights are those of a version."""
        begin, self._weights = self._weights, None
        if begin is not None:
            self._record("load_weights", begin, version)

    def end(self) -> None:
        """The replica ends."""
        self._end_busy()

    def _record(self, name: str, begin: float, version: str | None) -> None:
        number = int(version) if version is not None and version.isdecimal() else None
        events.record(name, begin, self._now(), version=number, replica=self._index)

    def _end_busy(self) -> None:
        if (span := self._busy.take()) is not None:
            self._record_busy(span)

    def _record_busy(self, span: BusySpan) -> None:
        events.record(
            "busy", span.begin, span.end, replica=self._index,
            args={"running": span.running, "waiting": span.waiting},
        )  # fmt: skip
