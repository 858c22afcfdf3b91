"""Event files of runs that never were: written as the processes of a run write them, with clocks of the test's."""

from dataclasses import dataclass, field
from pathlib import Path

from megarl.telemetry.trace.writer import EventClock, EventWriter

UNIX = 1_790_000_000.0  # when the simulated clocks begin
MOST_BYTES = 24 << 20


@dataclass
class SimulatedClock:
    """The clock of a host: `now` is monotonic, and the wall clock is ahead of true time by `ahead` seconds."""

    now: float = 1000.0
    ahead: float = 0.0
    _began: float = field(default=1000.0, repr=False)

    def clock(self) -> EventClock:
        return EventClock(
            lambda: self.now,
            lambda: round(self.now * 1e9),
            lambda: round((UNIX + self.now - self._began + self.ahead) * 1e9),
        )


def event_writer(
    run_dir: Path, process: str, clock: SimulatedClock, *, most_bytes: int = MOST_BYTES
) -> EventWriter:  # fmt: skip
    """A writer without a thread: the test calls `flush`."""
    return EventWriter(run_dir, process, most_bytes, clock.clock())
