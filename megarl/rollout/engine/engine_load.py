"""An engine's load and signs of life, from what vLLM's engine process reports after each step.

The scheduler's numbers come with the step's tokens, without a request; nothing is counted per token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.common.process import held_outputs
from megarl.telemetry.trace import events

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


@dataclass(frozen=True)
class EngineLoad:
    """The peaks of an engine since its last report.

    `kv_usage`: share of the KV cache in use, 0 to 1. `running`, `waiting`: requests in the engine's batch, and waiting
    for a place in it.
    """

    kv_usage: float = 0.0
    running: int = 0
    waiting: int = 0

    def __or__(self, other: EngineLoad) -> EngineLoad:
        """Return the peaks of both."""
        return EngineLoad(
            max(self.kv_usage, other.kv_usage), max(self.running, other.running), max(self.waiting, other.waiting)
        )


class EngineMonitor:
    """Receives every engine step, as one of vLLM's stat loggers."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        heard: Callable[[float, EngineLoad], object] = lambda now, load: None,
    ) -> None:
        """`heard` is called with the time and the load of each step."""
        self._now, self._reported = now, heard
        self.latest = EngineLoad()  # of the last step
        self._peak = EngineLoad()
        self._heard = now()
        self._held: set[str] = set()

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """Record a step."""
        self._heard = self._now()
        if scheduler_stats is not None:
            self.latest = EngineLoad(
                scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            )
            self._peak |= self.latest
            self._reported(self._heard, self.latest)

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls this once."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """Do nothing: the replica itself knows that its engine sleeps."""

    def take(self) -> EngineLoad:
        """Return the peaks since the last call."""
        peak, self._peak = self._peak, EngineLoad()
        return peak

    def hold(self, reason: str) -> None:
        """Expect no steps until `release` is called with the same reason: the engine is paused or busy."""
        self._held.add(reason)

    def release(self, reason: str) -> None:
        """End a `hold`; without one, do nothing."""
        self._held.discard(reason)
        self._heard = self._now()

    def silent_s(self, since: float) -> float:
        """Return how many seconds ago an engine that has had requests since `since` last made a step; 0 if held."""
        return 0.0 if self._held else max(self._now() - max(self._heard, since), 0.0)


def build_monitored(arguments: AsyncEngineArgs, monitor: EngineMonitor, hold_s: float) -> AsyncLLM:
    """Build an engine that reports its steps to `monitor` and sends the tokens of several steps together.

    `hold_s`: how long it may hold the tokens of unfinished responses. vLLM's statistics cost time for each token, so
    they are left out unless `disable_log_stats` is false.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    class MonitoredLLM(AsyncLLM):
        def _run_output_handler(self) -> None:
            if arguments.disable_log_stats:
                # The engine process sends the scheduler's numbers; this process counts no tokens.
                self.log_stats = False
                self.logger_manager.stat_loggers[:] = [monitor]
            super()._run_output_handler()

    os.environ.setdefault(held_outputs.VARIABLE, str(hold_s))  # for the engine's process
    return MonitoredLLM.from_engine_args(arguments, stat_loggers=[lambda config, index: monitor])


GAP_S = 0.1  # shorter breaks of an engine are not reported
LONGEST_S = 60.0  # of a span, so that a running run shows it
LOAD_S = 10.0  # between two records of the load


@dataclass
class _Busy:
    """A time span in which the engine had requests, and the peaks of their numbers."""

    begin: float
    end: float
    running: int = 0
    waiting: int = 0


class ReplicaActivity:
    """Records a replica's events: when its engine had requests, its load, its publications. For one event loop."""

    def __init__(self, index: int, now: Callable[[], float] = time.monotonic) -> None:
        self._index, self._now = index, now
        self._busy: _Busy | None = None
        self._idle = True  # whether no request was left after the last step
        self._load_at = float("-inf")
        self._paused: float | None = None
        self._weights: float | None = None

    def step(self, now: float, load: EngineLoad) -> None:
        """Record an engine step at `now`. Consecutive steps are joined into one span."""
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
        """Record a pause; a repeated publication may pause a paused replica."""
        self.end()
        self._paused = self._now() if self._paused is None else self._paused

    def resume(self, version: str | None) -> None:
        """Record that the replica generates again, with weights of that label."""
        begin, self._paused = self._paused, None
        if begin is not None:
            self._record("paused", begin, version)

    def begin_weights(self) -> None:
        """Record that the replica begins to receive weights."""
        self._weights = self._now()

    def end_weights(self, version: str) -> None:
        """Record that the replica has received the weights of a version."""
        begin, self._weights = self._weights, None
        if begin is not None:
            self._record("load_weights", begin, version)

    def end(self) -> None:
        """Record that the replica ends."""
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
