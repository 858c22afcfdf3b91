"""Measures the time of a step by phases, which do not overlap and add up to the wall time of the step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["generate", "queue", "logprobs", "update", "drain", "sync", "eval", "save"]
PHASES: tuple[Phase, ...] = get_args(Phase)


class PhaseTimer:
    """Measures exclusive wall-clock time per phase: a phase inside another one interrupts the outer phase's clock.

    Evaluation is reported but is not part of the step.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_phase: Callable[[Phase, float, float], object] = lambda name, begin, end: None,
    ) -> None:
        """`on_phase`: called with each phase at its end, its begin and end by the clock; includes inner phases."""
        self._clock, self._on_phase = clock, on_phase
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = self._start = clock()

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time of the block to phase `name`; raises ValueError for an unknown phase."""
        if name not in PHASES:
            raise ValueError(f"unknown phase {name!r}; phases are {', '.join(PHASES)}")
        self._count_time()
        begin = self._since
        self._stack.append(name)
        try:
            yield
        finally:
            self._count_time()
            self._stack.pop()
            self._on_phase(name, begin, self._since)

    def finish_step(self, engine_seconds: float = 0.0) -> dict[str, float]:
        """Close the step, start the next one, and return the `time/*` metrics.

        `engine_seconds`: wall time in which an engine ran since the previous batch. Overhead is the time outside
        engine, log-prob, update and sync time: queue, rewards, Ray, the loop itself. If engines run while the trainer
        works, only the engine time for which the trainer waited is subtracted. Raises RuntimeError inside a phase.
        """
        if self._stack:
            raise RuntimeError(f"the step ends inside phase {self._stack[-1]!r}")
        self._count_time()
        now = self._since
        took = {name: self._seconds.get(name, 0.0) for name in PHASES}
        step = now - self._start - took["eval"]
        other = max(0.0, step - sum(took[name] for name in PHASES if name != "eval"))
        waited = took["generate"] + took["drain"]
        engine = min(engine_seconds, waited + other)
        overhead = max(0.0, step - engine - took["logprobs"] - took["update"] - took["sync"])
        result = {f"time/{name}": seconds for name, seconds in took.items()}
        result |= {
            "time/step": step,
            "time/other": other,
            "time/overhead": overhead,
            "time/overhead_share": overhead / step if step else 0.0,
            "time/trainer_idle_ratio": waited / step if step else 0.0,
        }
        self._seconds, self._start = {}, now
        return result

    def _count_time(self) -> None:
        """Add the time since the last call to the innermost open phase."""
        now = self._clock()
        if self._stack:
            name = self._stack[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now
