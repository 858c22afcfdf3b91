"""The load of an engine, and signs that it is alive, from what vLLM's engine process says after each step.

The scheduler's numbers come with the step's tokens; nobody asks for them, and nothing is counted per token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.common.process import held_outputs

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.stats import SchedulerStats


@dataclass(frozen=True)
class EngineLoad:
    """The peaks of an engine since its last report.

    `kv_usage`: share of the KV cache in use, 0 to 1. `running`, `waiting`: requests in the engine's batch, and those
    that had no place in it.
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
    """Hears of every engine step; it has the methods of vLLM's stat loggers that an engine calls."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        heard: Callable[[float, EngineLoad], object] = lambda now, load: None,
    ) -> None:
        """`heard`: gets the time and the load of each step."""
        self._now, self._told = now, heard
        self.latest = EngineLoad()  # of the last step
        self._peak = EngineLoad()
        self._heard = now()
        self._held: set[str] = set()

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """Take note of a step."""
        self._heard = self._now()
        if scheduler_stats is not None:
            self.latest = EngineLoad(
                scheduler_stats.kv_cache_usage, scheduler_stats.num_running_reqs, scheduler_stats.num_waiting_reqs
            )
            self._peak |= self.latest
            self._told(self._heard, self.latest)

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM calls this once."""

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
        """Return for how many seconds an engine with requests from the time `since` on has made no step."""
        return 0.0 if self._held else max(self._now() - max(self._heard, since), 0.0)


def build_monitored(arguments: AsyncEngineArgs, monitor: EngineMonitor, hold_s: float) -> AsyncLLM:
    """Build an engine of whose steps `monitor` hears, and whose process sends the tokens of several steps together.

    `hold_s`: for how many seconds at most it holds the tokens of unfinished responses. vLLM's own statistics are left
    out, unless `disable_log_stats` is false: they cost time for each token.
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
