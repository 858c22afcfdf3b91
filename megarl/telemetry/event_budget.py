"""The bytes of events that each process may write, and the choice of what it leaves out to stay within them. Pure.

A day of a run writes at most `USED` of the budget, and that is also what is kept: older files are deleted. Each stream
has its share, and each process a share of that. A process that would write more leaves events out by a key, for example
the group of a request: of each 2, 4, 8, ... keys one is kept, the same ones in all processes, so what is there of a
trajectory is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.telemetry.event_kinds import STREAMS, EventStream

DAY_S = 86_400.0
# The rest is for what is written between two deletions.
USED = 0.85
SHARES: dict[EventStream, float] = {"rare": 0.05, "steps": 0.45, "details": 0.50}
# That a process may write at once. An hour of few events is kept whole; it also bounds what deletion is late for.
BURST = 1 / 8
MOST_LEFT_OUT = 1 << 20  # of so many keys at least one is kept

_MIX = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: consecutive numbers are spread evenly (Knuth, 6.4)
_WORD = (1 << 64) - 1
# The parts of a stream's share by role; what a run has none of goes to the others in the same proportion.
_ROLES: dict[EventStream, dict[str, float]] = {
    "rare": {"first rank": 1, "ranks": 1, "replicas": 1, "loops": 1},
    "steps": {"first rank": 35, "ranks": 35, "replicas": 15, "loops": 15},
    "details": {"first rank": 5, "ranks": 5, "replicas": 15, "loops": 75},
}


def rank_process(rank: int) -> str:
    """Return the name of a trainer rank in event files."""
    return f"trainer-rank-{rank}"


def replica_process(index: int) -> str:
    """Return the name of a replica in event files."""
    return f"replica-{index}"


def worker_process(index: int) -> str:
    """Return the name of an agent worker in event files."""
    return f"worker-{index}"


CONTROLLER = "controller"  # the rollout controller's name in event files


@dataclass(frozen=True)
class WritingProcesses:
    """The processes of a run that write events, besides its controller."""

    ranks: int
    replicas: int
    workers: int = 0

    @property
    def count(self) -> int:
        """Their number, the controller included."""
        return self.ranks + self.replicas + self.workers + 1

    def role(self, process: str) -> tuple[str, int]:
        """Return the role of a process, and how many have it."""
        kind = process.rpartition("-")[0]
        if process == rank_process(0):
            return "first rank", 1
        if kind == "trainer-rank":
            return "ranks", max(1, self.ranks - 1)
        if kind == "replica":
            return "replicas", max(1, self.replicas)
        return "loops", self.workers + 1  # the controller, and agent workers

    @property
    def _roles(self) -> set[str]:
        sizes = {"first rank": self.ranks, "ranks": self.ranks - 1, "replicas": self.replicas, "loops": 1}
        return {role for role, size in sizes.items() if size > 0}

    def share(self, process: str, stream: EventStream) -> float:
        """Return the part of a stream's bytes that a process may have; those of all processes add up to 1."""
        role, count = self.role(process)
        weights = _ROLES[stream]
        return weights[role] / sum(weights[each] for each in self._roles | {role}) / count


def kept_bytes(budget: int, stream: EventStream) -> int:
    """Return the bytes that all files of a stream may have together, and that a day may write."""
    return int(budget * USED * SHARES[stream])


def daily_bytes(budget: int, processes: WritingProcesses, process: str) -> dict[EventStream, float]:
    """Return how many bytes a process may write per day, by stream."""
    return {stream: kept_bytes(budget, stream) * processes.share(process, stream) for stream in STREAMS}


def spread(key: int) -> int:
    """Return a number below 2^64 for a key; those of consecutive keys are spread evenly."""
    return key * _MIX & _WORD


class Allowance:
    """The bytes that one stream of a process may write: at once a part of the daily ones, the rest over the day.

    The less is left, the fewer keys are kept: all while more than half of what may be written at once is left, every
    second one down to a quarter, every fourth one down to an eighth, and so on. So a steady load settles where what is
    kept is what may be written. In every span of a day at most the daily bytes are written.
    """

    def __init__(self, daily: float, now: float) -> None:
        """`now`: seconds of a clock that does not go back, as everywhere here."""
        self._full, self._rate = daily * BURST, daily * (1 - BURST) / DAY_S
        self._left, self._at = self._full, now
        self.one_in = 1
        self._bound, self._few = 1 << 64, self._full / 2

    def keeps(self, key: int) -> bool:
        """Tell whether the events of a key are kept now."""
        return spread(key) < self._bound

    def spend(self, size: int, now: float) -> bool:
        """Take the bytes of an event that is to be written; False if so many are not left: it is to be left out."""
        if now > self._at:
            self.refill(now)
        if size > self._left:
            return False
        self._left -= size
        if self._left <= self._few:  # else as many keys are kept as before
            self._adapt()
        return True

    def refill(self, now: float) -> None:
        """Count the time since the last call. Call it also when nothing is written, so that keys are kept again."""
        self._left = min(self._full, self._left + max(0.0, now - self._at) * self._rate)
        self._at = max(self._at, now)
        self._adapt()

    def _adapt(self) -> None:
        one_in, share = 1, 2 * self._left
        while share <= self._full and one_in < MOST_LEFT_OUT:
            one_in, share = 2 * one_in, 2 * share
        if one_in != self.one_in:
            self.one_in, self._bound = one_in, (1 << 64) // one_in
            self._few = self._full / (2 * one_in)
