"""The events of a trainer rank: its steps with their phases, its restarts and its failure."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from megarl.common.files import last_bytes
from megarl.common.rundir import rotating_lines
from megarl.run.ranks.failure import PeerFailedError, describe
from megarl.telemetry.trace import events
from megarl.telemetry.trace.lines import rank_process

LEAST_S = 0.5e-3  # of a recorded phase; shorter ones cannot be seen next to a step
TAIL_BYTES = 256 << 10  # more than a line of metrics.jsonl


class StepEvents:
    """Records the phases of each step, and the step itself, as spans. Before `begin` phases belong to no step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step: int | None = None
        self._since = 0.0

    def begin(self, step: int) -> None:
        """Begin a step; the first one of a run is 1."""
        self._step, self._since = step, self._clock()

    @property
    def step(self) -> int | None:
        """The step that is made now; None before the first one."""
        return self._step

    def finish_step(self) -> None:
        """Record the step that ends now and begin the next. Records nothing before `begin`."""
        if self._step is not None:
            events.record("step", self._since, self._clock(), step=self._step)
            self.begin(self._step + 1)

    def phase(self, name: str, begin: float, end: float) -> None:
        """Record a phase of the step, if it is long enough to be seen."""
        if end - begin >= LEAST_S:
            events.record(name, begin, end, step=self._step)


def begin_events(run_dir: Path, rank: int, mib: float) -> None:
    """Begin to record the events of this rank, in a file of at most `mib` MiB."""
    events.open_events(mib, run_dir, rank_process(rank))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank == 0 and restarts:
        events.recovery("ranks", f"torchrun has started the ranks again (restart {restarts})")


def end_with_failure(error: Exception, *, restarts: bool) -> None:
    """Record the failure of this rank, and write pending events. `restarts`: torchrun starts the ranks again."""
    if not isinstance(error, PeerFailedError):
        events.fault("ranks" if restarts else "run", describe(error))
    events.close_events()


class _WrittenAt(msgspec.Struct):
    wall_time: float


def end_of_history(run_dir: Path) -> float:
    """Return the Unix time of the last line of metrics.jsonl, where a resume continues; now if there is none. If the
    newest part is still empty, the one before is read.
    """
    for _, part in reversed(rotating_lines.parts(run_dir / "metrics.jsonl")):
        if lines := last_bytes(part, TAIL_BYTES).splitlines():
            try:
                return msgspec.json.decode(lines[-1], type=_WrittenAt).wall_time
            except msgspec.MsgspecError:
                break
    return time.time()
