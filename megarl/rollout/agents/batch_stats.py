"""What the rollout side measures for a batch. Pure: times are passed in."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import iadd

from megarl.common.values import first_parts
from megarl.queue.trajectory import SampleTag
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateResult

SLOWEST = 3  # trajectories of a step that are logged
PARTS = ("queue", "prefill", "decode", "tool", "reward", "other")


@dataclass
class TrajectoryTimes:
    """Where the time of a sample goes, in seconds. Concurrent work counts each time: parts may exceed the whole.

    `began`: on the monotonic clock. `ended`: Unix time; it and `seconds` are set at the end. `queue_s`: in the engine's
    queue or on the way there. `replica`: of the last response.
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
        """Add a response that took `seconds`."""
        self.turns += 1
        self.tokens += len(result.response_ids)
        self.replica = result.replica
        self.queue_s += result.queue_s + max(0.0, seconds - result.seconds)
        self.prefill_s += result.prefill_s
        self.decode_s += max(0.0, result.seconds - result.queue_s - result.prefill_s)

    def end(self, now: float, unix: float) -> None:
        """Record that the sample ends at `now` on the monotonic clock, which is Unix time `unix`."""
        self.seconds, self.ended = now - self.began, unix

    @property
    def other_s(self) -> float:
        """The rest, for example of a loop that spends time outside its context."""
        known = self.queue_s + self.prefill_s + self.decode_s + self.tool_s + self.reward_s
        return max(0.0, self.seconds - known)

    @property
    def cause(self) -> str:
        """The largest part, one of `PARTS`."""
        return max(PARTS, key=lambda part: float(getattr(self, f"{part}_s")))

    def args(self) -> dict[str, int | float]:
        """Return the fields of its event."""
        # Written out for speed: it runs for every trajectory.
        return {
            "turns": self.turns, "tokens": self.tokens, "queue_s": round(self.queue_s, 4),
            "prefill_s": round(self.prefill_s, 4), "decode_s": round(self.decode_s, 4),
            "tool_s": round(self.tool_s, 4), "reward_s": round(self.reward_s, 4), "other_s": round(self.other_s, 4),
        }  # fmt: skip


def by_slowness(times: TrajectoryTimes) -> tuple[float, int, int]:
    """Return a sort key that puts the slowest sample first."""
    return -times.seconds, times.group, times.sample


def slowest(times: Iterable[TrajectoryTimes]) -> list[TrajectoryTimes]:
    """Return the `SLOWEST` slowest samples, the slowest first."""
    return heapq.nsmallest(SLOWEST, times, key=by_slowness)


class BusyClock:
    """Measures the wall time during which at least one engine ran.

    Transport to the engine and back is not engine time. An answer reports how long the engine worked on the request;
    that interval is assumed to end when the answer arrives.
    """

    def __init__(self) -> None:
        self._running: dict[int, float] = {}
        self._intervals: list[tuple[float, float]] = []  # disjoint, in order
        self._taken_until = float("-inf")

    def enter(self, key: int, now: float) -> None:
        """Record that request `key` is sent to an engine."""
        self._running[key] = now

    def leave(self, key: int, now: float, seconds: float) -> None:
        """Record that request `key` is answered after `seconds` of engine time. Raises KeyError without `enter`."""
        left = self._running.pop(key)
        self._add(max(left, now - seconds), now)

    def take(self, now: float) -> float:
        """Return the seconds since the last `take` in which an engine ran; open requests count since they were sent."""
        if self._running:
            self._add(min(self._running.values()), now)
        total = sum(end - begin for begin, end in self._intervals)
        self._intervals, self._taken_until = [], now
        return total

    def _add(self, begin: float, end: float) -> None:
        begin = max(begin, self._taken_until)
        if begin >= end:
            return
        while self._intervals and self._intervals[-1][1] >= begin:
            begin = min(begin, self._intervals.pop()[0])
        self._intervals.append((begin, end))


@dataclass
class BatchStats:
    """Statistics of the samples that finished since the last batch was taken. Times in seconds."""

    generate_seconds: list[float] = field(default_factory=list)
    reward_seconds: list[float] = field(default_factory=list)
    teacher_seconds: list[float] = field(default_factory=list)  # of each group
    reward_errors: Counter[str] = field(default_factory=Counter)
    rewards_redone: int = 0
    skipped_prompts: int = 0
    continued: int = 0
    cut: int = 0
    kept: int = 0  # groups that a resume continued
    engine_seconds: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0
    malformed_calls: int = 0
    overflows: int = 0  # trajectories that ended because a tool's answer did not fit
    turns: list[int] = field(default_factory=list)  # of each trajectory of an agent
    tool_seconds: list[float] = field(default_factory=list)
    interval: float | None = None  # since the batch before was taken; engines ran for `engine_seconds` of it
    replaced_rewards: list[float] = field(default_factory=list)  # the mean of each replaced group, unshaped
    replaced_tokens: int = 0
    failed_lengths: list[int] = field(default_factory=list)  # response tokens of each sample of the failed groups
    slowest: list[TrajectoryTimes] = field(default_factory=list)

    def note_replaced(self, samples: Sequence[SampleTag]) -> None:
        """Record a replaced group without signal; at least one of its samples must be "ok"."""
        rewards = [each.reward for each in first_parts(samples) if each.status == "ok"]
        self.replaced_rewards.append(sum(rewards) / len(rewards))
        self.replaced_tokens += sum(each.response_tokens for each in samples)

    def note_times(self, times: TrajectoryTimes) -> None:
        """Keep a sample's times if it is among the slowest."""
        if len(self.slowest) < SLOWEST or times.seconds > self.slowest[-1].seconds:
            insort(self.slowest, times, key=by_slowness)
            del self.slowest[SLOWEST:]

    def add(self, other: BatchStats) -> None:
        """Add the measurements of the samples of one group."""
        for name in _OF_SAMPLES:
            setattr(self, name, iadd(getattr(self, name), getattr(other, name)))
        self.slowest = slowest([*self.slowest, *other.slowest])

    def metrics(
        self, *, replicas_serving: int, replicas_lost: int, replicas_idle: int = 0, load: EngineLoad
    ) -> dict[str, float]:
        """Return the `rollout/*`, `reward/*` and `agent/*` metrics that only the rollout side can measure."""
        values: dict[str, float] = {
            "rollout/skipped_prompts": self.skipped_prompts,
            "rollout/continued": self.continued,
            "rollout/cut": self.cut,
            "rollout/groups_kept": self.kept,
            "rollout/engine_seconds": self.engine_seconds,
            "rollout/replicas_alive": replicas_serving,
            "rollout/replicas_lost": replicas_lost,
            "rollout/replicas_idle": replicas_idle,
            "rollout/kv_usage_max": load.kv_usage,
            "rollout/running_max": load.running,
            "rollout/waiting_max": load.waiting,
            "reward/errors": sum(self.reward_errors.values()),
            "reward/redone": self.rewards_redone,
        }
        if self.interval:
            values["rollout/idle_ratio"] = max(0.0, 1.0 - self.engine_seconds / self.interval)
        if self.replaced_rewards:
            values |= {
                "rollout/replaced_reward_mean": sum(self.replaced_rewards) / len(self.replaced_rewards),
                "rollout/replaced_tokens": self.replaced_tokens,
            }
        values |= _spread("rollout/failed_length", self.failed_lengths)
        if self.turns:
            values |= {
                **_spread("agent/turns", self.turns),
                "agent/tool_calls_mean": self.tool_calls / len(self.turns),
                "agent/tool_errors": self.tool_errors,
                "agent/malformed_calls": self.malformed_calls,
                "agent/overflows": self.overflows,
                **_spread("agent/tool_seconds", self.tool_seconds),
            }
        if self.generate_seconds:
            ordered = sorted(self.generate_seconds)
            values |= {
                "rollout/generate_seconds_p50": quantile(ordered, 0.50),
                "rollout/generate_seconds_p95": quantile(ordered, 0.95),
                "rollout/generate_seconds_p99": quantile(ordered, 0.99),
                "rollout/generate_seconds_max": ordered[-1],
            }
        values |= _spread("rollout/reward_seconds", self.reward_seconds)
        values |= _spread("rollout/teacher_seconds", self.teacher_seconds)
        return values


# Fields measured per sample; the others belong to the whole run.
_OF_SAMPLES = (
    "generate_seconds", "reward_seconds", "teacher_seconds", "reward_errors", "rewards_redone", "continued", "cut",
    "tool_calls", "tool_errors", "malformed_calls", "overflows", "turns", "tool_seconds",
)  # fmt: skip


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the metrics `NAME_mean` and `NAME_max` of values, if there are any."""
    return {f"{name}_mean": sum(values) / len(values), f"{name}_max": max(values)} if values else {}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the element at index floor(q n), or the last one, of a sorted sequence of n > 0 elements."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
