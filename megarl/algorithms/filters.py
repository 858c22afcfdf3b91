"""Selects what a batch trains on, from the rewards of its groups: shaping, filter, advantages, counts.

Invariant: every sample ends as exactly one of trained, masked, filtered or failed. A sample may have several rows
(`megarl.common.values`), which share its reward and its advantage.

With `admission.refill` the rollout side calls `without_signal` for each finished group before it is queued (dynamic
sampling); `shape_batch` filters with the same function, so both sides agree on every group.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.algorithms.interface.group_rewards import Advantages, GroupRewards, advantages_of, zero_variance
from megarl.algorithms.interface.registry import Chosen
from megarl.common.values import by_sample
from megarl.queue.trajectory import SampleTag

TruncatedPolicy = Literal["keep", "mask", "zero_reward"]


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return DAPO's soft overlong punishment (arXiv:2503.14476 eq. 13), <= 0, to be added to the reward.

    It is 0 up to `max_tokens - buffer` response tokens, falls linearly to `-penalty` at `max_tokens`, and stays there.
    `buffer=0` turns it off. Raises ValueError if the buffer is negative or longer than `max_tokens`.
    """
    if buffer == 0:
        return 0.0
    if not 0 < buffer <= max_tokens:
        raise ValueError(f"overlong buffer of {buffer} tokens must be within 0..max_tokens ({max_tokens})")
    excess = length - (max_tokens - buffer)
    return -penalty * min(max(excess, 0) / buffer, 1.0)


def apply_truncation(policy: TruncatedPolicy, truncated: bool, reward: float) -> tuple[float, bool]:
    """Return a sample's reward, and whether its tokens enter the loss, under the policy `sampling.truncated`.

    `mask` keeps a truncated sample's reward in its group's statistics (DAPO's overlong filtering, arXiv:2503.14476
    section 3.4).
    """
    if not truncated or policy == "keep":
        return reward, True
    return (reward, False) if policy == "mask" else (0.0, True)


@dataclass(frozen=True)
class ShapingSpec:
    """The options of shaping, as in the config sections `algorithm` and `sampling`; lengths in tokens.

    `permutation_seed`: if given, rewards are first shuffled inside each group (`algorithm.permute_rewards`).
    `unfiltered`: data sets whose groups are trained even with equal rewards, because a teacher provides the signal.
    `by_turn`: the advantage also uses turn rewards, so they are a signal too.
    """

    truncated: TruncatedPolicy
    max_tokens: int
    overlong_buffer: int
    overlong_penalty: float
    filter_zero_variance: bool
    permutation_seed: int | None = None
    unfiltered: frozenset[str] = frozenset()
    by_turn: bool = False


@dataclass(frozen=True)
class ShapedBatch:
    """The result of shaping. `groups`: the rows of the kept groups, in order, with shaped rewards and with advantages.

    The counts cover the whole batch.
    """

    groups: list[list[SampleTag]]
    trained_groups: int = 0
    filtered_groups: int = 0  # zero variance
    failed_groups: int = 0  # fewer than two samples that did not fail
    masked_samples: int = 0


def shape_group(alive: Sequence[Sequence[SampleTag]], spec: ShapingSpec) -> list[tuple[float, bool]]:
    """Return each sample's shaped reward and whether it is trained: truncation policy first, then overlong penalty.

    `alive`: the rows of each sample of one group that did not fail, in index order. A sample is as long as its longest
    row, and truncated if any row is. Demonstrations have reward 0 and are trained.
    """
    if alive and alive[0][0].demonstrated:
        return [(0.0, True)] * len(alive)
    rewards = [rows[0].reward for rows in alive]
    if spec.permutation_seed is not None and alive:
        random.Random(f"{spec.permutation_seed}:{alive[0][0].group_id}").shuffle(rewards)
    shaped = []
    for rows, raw in zip(alive, rewards, strict=True):
        reward, trained = apply_truncation(spec.truncated, any(row.truncated for row in rows), raw)
        length = max(row.response_tokens for row in rows)
        penalty = overlong_penalty(length, spec.max_tokens, spec.overlong_buffer, spec.overlong_penalty)
        shaped.append((reward + penalty, trained))
    return shaped


def shape_turns(alive: Sequence[Sequence[SampleTag]], spec: ShapingSpec) -> list[list[float]]:
    """Return the turn rewards of each sample of `shape_group`, over its rows in order.

    They are 0 if the truncation policy zeroes the sample's reward. A permutation shuffles each turn's rewards among the
    samples that have the turn.
    """
    found = [[reward for row in rows for reward in row.turn_rewards] for rows in alive]
    if spec.permutation_seed is not None:
        for turn in range(max(map(len, found), default=0)):
            having = [each for each in found if turn < len(each)]
            values = [each[turn] for each in having]
            random.Random(f"{spec.permutation_seed}:{alive[0][0].group_id}:{turn}").shuffle(values)
            for each, value in zip(having, values, strict=True):
                each[turn] = value
    zeroed = spec.truncated == "zero_reward"
    return [
        [0.0] * len(each) if zeroed and any(row.truncated for row in rows) else each
        for rows, each in zip(alive, found, strict=True)
    ]


def alive_samples(group: Sequence[SampleTag]) -> list[list[SampleTag]]:
    """Return the rows of a group's samples that did not fail. One failed row fails its sample."""
    return [rows for rows in by_sample(group) if not any(row.failed for row in rows)]


def without_signal(group: Sequence[SampleTag], spec: ShapingSpec) -> bool:
    """Return whether `spec`'s filter drops a group: at least two samples did not fail, all with equal shaped rewards.

    With `by_turn` the rewards of each turn must be equal too. A group with fewer samples counts as failed instead.
    Demonstrations and unfiltered data sets are kept: their signal is not in the rewards.
    """
    alive = alive_samples(group)
    if not spec.filter_zero_variance or len(alive) < 2:
        return False
    if alive[0][0].demonstrated or alive[0][0].dataset in spec.unfiltered:
        return False
    if not zero_variance([r for r, _ in shape_group(alive, spec)]):
        return False
    return not spec.by_turn or all(map(zero_variance, _turn_by_turn(shape_turns(alive, spec))))


def _turn_by_turn(samples: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return for each turn the rewards of the samples that have it."""
    most = max(map(len, samples), default=0)
    return [[each[turn] for each in samples if turn < len(each)] for turn in range(most)]


def shape_batch(
    groups: Sequence[Sequence[SampleTag]],
    spec: ShapingSpec,
    advantage: Chosen[GroupRewards, Advantages],
    limits: Sequence[int] | None = None,
) -> ShapedBatch:
    """Shape rewards, drop failed samples, filter groups without variance, compute advantages.

    A group with fewer than two remaining samples has no baseline: the group and its samples count as failed. The filter
    compares shaped rewards, as the advantages do; a KL term in the reward is added later and does not affect it.
    `limits`: `max_tokens` of each group, if they differ.

    Raises:
        ValueError: two rows share a key, the parts of a sample are not in order, or an advantage is not finite.
    """
    keys = [sample.key for group in groups for sample in group]
    if len(set(keys)) != len(keys):
        raise ValueError("two samples of the batch share a key")
    kept: list[list[SampleTag]] = []
    counts = dict.fromkeys(("filtered_groups", "failed_groups"), 0)
    for index, group in enumerate(groups):
        alive = alive_samples(group)
        if len(alive) < 2:
            counts["failed_groups"] += 1
            continue
        own = spec if limits is None else replace(spec, max_tokens=limits[index])
        if without_signal(group, own):
            counts["filtered_groups"] += 1
            continue
        kept.append(_shaped_rows(alive, own))
    kept = with_advantages(kept, advantage)
    return ShapedBatch(
        groups=kept,
        trained_groups=len(kept),
        masked_samples=sum(not row.trained and row.part == 0 for group in kept for row in group),
        **counts,
    )


def _shaped_rows(alive: Sequence[Sequence[SampleTag]], spec: ShapingSpec) -> list[SampleTag]:
    """Return the rows of a group with shaped rewards, without advantages."""
    made = []
    for rows, (reward, trained), turns in zip(
        alive, shape_group(alive, spec), shape_turns(alive, spec), strict=True
    ):  # fmt: skip
        left = iter(turns)
        for row in rows:
            own = list(itertools.islice(left, len(row.turn_rewards)))
            made.append(replace(row, reward=reward, trained=trained, turn_rewards=own))
    return made


def with_advantages(
    groups: Sequence[Sequence[SampleTag]], advantage: Chosen[GroupRewards, Advantages]
) -> list[list[SampleTag]]:
    """Return the rows of the groups with the advantages of their rewards, which all rows of a sample share.

    Groups of demonstrations are returned unchanged: their rewards must not affect a baseline of the whole batch. Raises
    ValueError if a reward or an advantage is not finite.
    """
    judged = [group for group in groups if not group[0].demonstrated]
    found = iter(_with_advantages(judged, advantage))
    return [list(group) if group[0].demonstrated else next(found) for group in groups]


def _with_advantages(
    groups: Sequence[Sequence[SampleTag]], advantage: Chosen[GroupRewards, Advantages]
) -> list[list[SampleTag]]:
    samples = [by_sample(group) for group in groups]
    batch = GroupRewards(
        rewards=[[rows[0].reward for rows in group] for group in samples],
        tokens=[
            [sum(row.sampled_tokens for row in rows) if rows[0].trained else 0 for rows in group] for group in samples
        ],
        turn_rewards=_turn_rewards(samples),
    )
    return [
        [row for rows, value in zip(group, values, strict=True) for row in _with_advantage(rows, value)]
        for group, values in zip(samples, advantages_of(advantage, batch), strict=True)
    ]


def _turn_rewards(groups: Sequence[Sequence[Sequence[SampleTag]]]) -> list[list[list[float]]]:
    """Return the turn rewards of each sample of each group; [] if there are none."""
    found = [[[reward for row in rows for reward in row.turn_rewards] for rows in group] for group in groups]
    return found if any(each for group in found for each in group) else []


def _with_advantage(rows: Sequence[SampleTag], value: float | Sequence[float]) -> list[SampleTag]:
    """Return a sample's rows with its advantage, or its turns' advantages."""
    if not isinstance(value, Sequence):
        return [replace(row, advantage=value) for row in rows]
    mean, left = math.fsum(value) / max(1, len(value)), iter(value)
    return [
        replace(row, advantage=mean, turn_advantages=list(itertools.islice(left, len(row.turn_rewards))))
        for row in rows
    ]
