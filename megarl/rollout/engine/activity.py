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


@dataclass
class _Busy:
    """A time in which the engine had requests, with the most of them."""

    begin: float
    end: float
    running: int = 0
    waiting: int = 0


class ReplicaActivity:
    """Records the events of one replica. Its methods are called where things happen, in the actor's event loop."""

    def __init__(self, index: int, now: Callable[[], float] = time.monotonic) -> None:
        self._index, self._now = index, now
        self._busy: _Busy | None = None
        self._idle = True  # whether no request was left after the last step
        self._load_at = float("-inf")
        self._paused: float | None = None
        self._weights: float | None = None

    def step(self, now: float, load: EngineLoad) -> None:
        """Take note of an engine step at `now`. Steps are joined to times without a break."""
        is_busy, begin = load.running + load.waiting > 0, now
        before = self._busy
        if before is not None and ((self._idle and now - before.end > GAP_S) or now - before.begin > LONGEST_S):
            begin = now if self._idle else before.end
            self._end_busy()
        if self._busy is None and is_busy:
            self._busy = _Busy(begin, now)
        if self._busy is not None:
            self._busy.end = now if is_busy or not self._idle else self._busy.end
            self._busy.running = max(self._busy.running, load.running)
            self._busy.waiting = max(self._busy.waiting, load.waiting)
        self._idle = not is_busy
        if now - self._load_at >= LOAD_S:
            self._load_at = now
            events.record(
                "load", now, replica=self._index,
                args={"running": load.running, "waiting": load.waiting, "kv_usage": round(load.kv_usage, 4)},
            )  # fmt: skip

    def pause(self) -> None:
        """The replica pauses; it may be paused already, by a publication that is repeated."""
        self.end()
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
        self._idle = True

    def _record(self, name: str, begin: float, version: str | None) -> None:
        number = int(version) if version is not None and version.isdecimal() else None
        events.record(name, begin, self._now(), version=number, replica=self._index)

    def _end_busy(self) -> None:
        span, self._busy = self._busy, None
        if span is not None:
            events.record(
                "busy", span.begin, span.end, replica=self._index,
                args={"running": span.running, "waiting": span.waiting},
            )  # fmt: skip
