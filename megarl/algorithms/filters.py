"""From the rewards of a batch's groups to what is trained on: shaping, filter, advantages, counts.

Invariant: every sample that comes in leaves as exactly one of trained, masked, filtered or failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megarl.algorithms.advantages import (
    AdvantageKind,
    TruncatedPolicy,
    apply_truncation,
    group_advantages,
    overlong_penalty,
    zero_variance,
)


class JudgedSample(Protocol):
    """What shaping needs to know of a sample (`megarl.queue.trajectory.SampleTag` has it)."""

    @property
    def key(self) -> str: ...

    @property
    def reward(self) -> float: ...

    @property
    def response_tokens(self) -> int: ...

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the token limit."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the sample must never be trained on."""
        ...


@dataclass(frozen=True)
class ShapedSample:
    """A sample that goes to the trainer. `trained` False: its tokens are masked from the loss."""

    key: str
    group: int  # index into the groups that came in
    reward: float  # after shaping
    advantage: float
    trained: bool = True


@dataclass(frozen=True)
class ShapingSpec:
    """The knobs, as in the configuration sections `algorithm` and `sampling`."""

    advantage: AdvantageKind = "grpo"
    truncated: TruncatedPolicy = "keep"
    max_tokens: int = 1
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0
    filter_zero_variance: bool = True


@dataclass(frozen=True)
class ShapedBatch:
    """`groups`: the kept groups' samples, in order. The counts cover everything that came in."""

    groups: list[list[ShapedSample]]
    trained_groups: int = 0
    filtered_groups: int = 0  # zero variance
    failed_groups: int = 0  # fewer than two samples left
    failed_samples: int = 0
    masked_samples: int = 0
    truncated_samples: int = 0
    solved_all: int = 0  # groups whose raw rewards are all equal and > 0
    solved_none: int = 0  # groups whose raw rewards are all equal and <= 0
    filtered_keys: list[str] = field(default_factory=list)
    failed_keys: list[str] = field(default_factory=list)


def shape_sample(sample: JudgedSample, spec: ShapingSpec) -> tuple[float, bool]:
    """(shaped reward, whether it is trained): truncation policy first, then the overlong penalty."""
    reward, trained = apply_truncation(spec.truncated, sample.truncated, sample.reward)
    penalty = overlong_penalty(sample.response_tokens, spec.max_tokens, spec.overlong_buffer, spec.overlong_penalty)
    return reward + penalty, trained


def shape_batch(groups: Sequence[Sequence[JudgedSample]], spec: ShapingSpec) -> ShapedBatch:
    """Shape rewards, drop failed samples, filter groups without variance, compute advantages.

    A group with fewer than two samples left has no baseline and counts as failed, its samples too. The filter
    judges shaped rewards, because those make the advantages; a KL term in the reward comes later and is not
    judged. Raises ValueError if two samples share a key.
    """
    keys = [sample.key for group in groups for sample in group]
    if len(set(keys)) != len(keys):
        raise ValueError("two samples of the batch share a key")
    kept: list[list[ShapedSample]] = []
    counts = dict.fromkeys(("filtered_groups", "failed_groups", "solved_all", "solved_none"), 0)
    filtered: list[str] = []
    failed = [sample.key for group in groups for sample in group if sample.failed]
    for index, group in enumerate(groups):
        alive = [sample for sample in group if not sample.failed]
        if len(alive) < 2:
            counts["failed_groups"] += 1
            failed += [sample.key for sample in alive]
            continue
        if zero_variance([sample.reward for sample in alive]):
            counts["solved_all" if alive[0].reward > 0 else "solved_none"] += 1
        shaped = [shape_sample(sample, spec) for sample in alive]
        rewards = [reward for reward, _ in shaped]
        if spec.filter_zero_variance and zero_variance(rewards):
            counts["filtered_groups"] += 1
            filtered += [sample.key for sample in alive]
            continue
        (advantages,) = group_advantages([rewards], spec.advantage)
        kept.append(
            [
                ShapedSample(sample.key, index, reward, advantage, trained)
                for sample, (reward, trained), advantage in zip(alive, shaped, advantages, strict=True)
            ]
        )
    return ShapedBatch(
        groups=kept,
        trained_groups=len(kept),
        failed_samples=len(failed),
        masked_samples=sum(not sample.trained for group in kept for sample in group),
        truncated_samples=sum(s.truncated for group in groups for s in group if not s.failed),
        filtered_keys=filtered,
        failed_keys=failed,
        **counts,
    )
