"""The parts of a sample's time: waiting, prefill, decoding, tools, reward. Times are passed in.

Requests and tools that a loop has run side by side count each for itself, so the parts may be more than the whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from megarl.rollout.engine.messages import GenerateResult

SLOWEST = 3  # trajectories of a step that are told of
PARTS = ("queue", "prefill", "decode", "tool", "reward", "other")


@dataclass
class TrajectoryTimes:
    """Where the time of a sample goes, in seconds. `replica`: of its last response.

    `began`: by the monotonic clock. `seconds` and `ended`, in Unix time, are known at its end. `queue_s`: without an
    engine's work, in the queue of the engine or on the way there.
    """

    group: int
    sample: int
    began: float
    replica: int = -1
    ended: float = 0.0
    seconds: float = 0.0
    turns: int = 0
    tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tool_s: float = 0.0
    reward_s: float = 0.0

    def add_turn(self, result: GenerateResult, seconds: float) -> None:
        """Add a response that came after `seconds`."""
        self.turns += 1
        self.tokens += len(result.response_ids)
        self.replica = result.replica
        self.queue_s += result.queue_s + max(0.0, seconds - result.seconds)
        self.prefill_s += result.prefill_s
        self.decode_s += max(0.0, result.seconds - result.queue_s - result.prefill_s)

    def end(self, now: float, unix: float) -> None:
        """Note that the sample ends at `now` by the monotonic clock, at Unix time `unix`."""
        self.seconds, self.ended = now - self.began, unix

    @property
    def other_s(self) -> float:
        """The rest, for example of a loop that does not use its context for something that takes long."""
        known = self.queue_s + self.prefill_s + self.decode_s + self.tool_s + self.reward_s
        return max(0.0, self.seconds - known)

    @property
    def cause(self) -> str:
        """The largest part, one of `PARTS`."""
        return max(PARTS, key=lambda part: float(getattr(self, f"{part}_s")))

    def args(self) -> dict[str, int | float]:
        """Return what an event says of it."""
        # Written out: this is done for every trajectory of a run.
        return {
            "turns": self.turns, "tokens": self.tokens, "queue_s": round(self.queue_s, 4),
            "prefill_s": round(self.prefill_s, 4), "decode_s": round(self.decode_s, 4),
            "tool_s": round(self.tool_s, 4), "reward_s": round(self.reward_s, 4), "other_s": round(self.other_s, 4),
        }  # fmt: skip


def by_slowness(times: TrajectoryTimes) -> tuple[float, int, int]:
    """Return a key by which the slowest sample comes first; of equal ones the first."""
    return -times.seconds, times.group, times.sample


def slowest(times: Iterable[TrajectoryTimes]) -> list[TrajectoryTimes]:
    """Return the `SLOWEST` ones, the slowest first."""
    return heapq.nsmallest(SLOWEST, times, key=by_slowness)
