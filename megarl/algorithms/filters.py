"""Selects what a batch trains on, from the rewards of its groups: shaping, filter, advantages, counts.

Invariant: every sample that comes in leaves as exactly one of trained, masked, filtered or failed.

The rollout side asks `without_signal` of each finished group before it is queued (dynamic sampling); `shape_batch`
filters by the same function, so that both sides agree on every group.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """The fields of a sample that shaping reads; `megarl.queue.trajectory.SampleTag` has them."""

    @property
    def key(self) -> str:
        """The sample's key in the queue, `group:sample`."""

    @property
    def group_id(self) -> int:
        """The number of the prompt group."""

    @property
    def reward(self) -> float:
        """The score of the reward function, before shaping."""

    @property
    def response_tokens(self) -> int:
        """The number of response tokens, with those that the model did not sample."""

    @property
    def truncated(self) -> bool:
        """Tell whether the response was cut at the token limit."""
        ...

    @property
    def failed(self) -> bool:
        """Tell whether the sample must never be trained on."""
        ...


@dataclass(frozen=True)
class ShapedSample:
    """A sample that is sent to the trainer. With `trained` False its tokens are masked from the loss."""

    key: str
    group: int  # index into the groups that came in
    reward: float  # after shaping
    advantage: float
    trained: bool = True


@dataclass(frozen=True)
class ShapingSpec:
    """The options of shaping, as in the configuration sections `algorithm` and `sampling`; lengths in tokens.

    `permutation_seed`: if given, rewards are first shuffled inside each group (`algorithm.permute_rewards`).
    """

    advantage: AdvantageKind
    truncated: TruncatedPolicy
    max_tokens: int
    overlong_buffer: int
    overlong_penalty: float
    filter_zero_variance: bool
    permutation_seed: int | None = None


@dataclass(frozen=True)
class ShapedBatch:
    """The result of shaping. `groups`: the samples of the kept groups, in order. The counts cover the whole batch."""

    groups: list[list[ShapedSample]]
    trained_groups: int = 0
    filtered_groups: int = 0  # zero variance
    failed_groups: int = 0  # fewer than two samples that did not fail
    masked_samples: int = 0


def shape_group(alive: Sequence[JudgedSample], spec: ShapingSpec) -> list[tuple[float, bool]]:
    """Return each sample's shaped reward and whether it is trained: truncation policy first, then overlong penalty.

    `alive`: the samples of one group that did not fail, in the order of their indices.
    """
    rewards = [sample.reward for sample in alive]
    if spec.permutation_seed is not None and alive:
        random.Random(f"{spec.permutation_seed}:{alive[0].group_id}").shuffle(rewards)
    shaped = []
    for sample, raw in zip(alive, rewards, strict=True):
        reward, trained = apply_truncation(spec.truncated, sample.truncated, raw)
        penalty = overlong_penalty(sample.response_tokens, spec.max_tokens, spec.overlong_buffer, spec.overlong_penalty)
        shaped.append((reward + penalty, trained))
    return shaped


def without_signal(group: Sequence[JudgedSample], spec: ShapingSpec) -> bool:
    """Tell whether `spec`'s filter drops a group: it has two samples that did not fail, and equal shaped rewards.

    A group with fewer is not without signal but failed.
    """
    alive = [sample for sample in group if not sample.failed]
    return spec.filter_zero_variance and len(alive) >= 2 and zero_variance([r for r, _ in shape_group(alive, spec)])


def shape_batch(
    groups: Sequence[Sequence[JudgedSample]], spec: ShapingSpec, limits: Sequence[int] | None = None
) -> ShapedBatch:
    """Shape rewards, drop failed samples, filter groups without variance, compute advantages.

    A group with fewer than two remaining samples has no baseline: the group and its samples count as failed. The
    filter compares shaped rewards, because the advantages are made of them; a KL term in the reward is added later
    and has no influence on the filter. `limits`: the `max_tokens` of each group, where they differ.

    Raises:
        ValueError: two samples share a key.
    """
    keys = [sample.key for group in groups for sample in group]
    if len(set(keys)) != len(keys):
        raise ValueError("two samples of the batch share a key")
    kept: list[list[ShapedSample]] = []
    counts = dict.fromkeys(("filtered_groups", "failed_groups"), 0)
    for index, group in enumerate(groups):
        alive = [sample for sample in group if not sample.failed]
        if len(alive) < 2:
            counts["failed_groups"] += 1
            continue
        own = spec if limits is None else replace(spec, max_tokens=limits[index])
        if without_signal(alive, own):
            counts["filtered_groups"] += 1
            continue
        shaped = shape_group(alive, own)
        (advantages,) = group_advantages([[reward for reward, _ in shaped]], spec.advantage)
        kept.append(
            [
                ShapedSample(sample.key, index, reward, advantage, trained)
                for sample, (reward, trained), advantage in zip(alive, shaped, advantages, strict=True)
            ]
        )
    return ShapedBatch(
        groups=kept,
        trained_groups=len(kept),
        masked_samples=sum(not sample.trained for group in kept for sample in group),
        **counts,
    )
