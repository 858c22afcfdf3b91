"""The bucket of each token: the same on every rank, exact in replica and lag, and bounded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.objective.stats import NO_SOURCE, OriginGaps
from megarl.config.checks.telemetry import MOST_LAGS, SourceBuckets
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.run.step.off_policy import TokenOrigins
from tests.support.trainer.configs import config as config_of


def config(replicas: int = 2, staleness: int = 4, **changes: Any) -> Any:
    ahead = {"mode": "async", "sync_interval": 1, "max_staleness": staleness}
    return config_of("model", rollout__replicas=replicas, admission=ahead, **changes)


def row(spans: tuple[VersionSpan, ...], tokens: int, group: int = 0) -> Trajectory:
    return Trajectory(group, 0, [1], [5] * tokens, [-0.5] * tokens, spans, "stop", 1.0)


def of_row(sources: TokenOrigins, one: Trajectory, version: int) -> torch.Tensor:
    (sources_R,) = sources.of_rows([one], [version])
    return sources_R


def test_the_parts_of_one_response_keep_their_replicas_and_lags() -> None:
    """Replica 0 began with version 3, went on with 5; replica 7 made the end. Token 6 was inserted by a tool."""
    spans = (
        VersionSpan(3, 0, 2, replica=0),
        VersionSpan(5, 2, 4, replica=0),
        VersionSpan(5, 4, 6, replica=7),
        VersionSpan(5, 7, 8),
    )
    one = row(spans, 8)
    assert one.tag.replicas == [0, 7]
    sources = TokenOrigins.of([one.tag], SourceBuckets.of(config()))
    buckets = sources.buckets
    assert (buckets.slots, buckets.lags, sources.slot_of) == (5, 5, {0: 0, 7: 1})
    other = buckets.slots - 1
    assert of_row(sources, one, 6).tolist() == [
        *[buckets.index(0, 3)] * 2, *[buckets.index(0, 1)] * 2, *[buckets.index(1, 1)] * 2,
        NO_SOURCE, buckets.index(other, 1),
    ]  # fmt: skip


def test_rows_keep_their_own_tokens_and_versions() -> None:
    """The rows have several lengths: one is empty, and one has a span that ends beyond it."""
    rows = [
        row((VersionSpan(3, 0, 2, replica=0),), 3),
        row((), 0, group=1),
        row((VersionSpan(3, 0, 9, replica=1),), 2, group=2),
        row((VersionSpan(4, 1, 2, replica=0),), 2, group=3),
    ]
    sources = TokenOrigins.of([each.tag for each in rows], SourceBuckets.of(config()))
    index = sources.buckets.index
    found = sources.of_rows(rows, [3, 3, 5, 6])
    assert [each.tolist() for each in found] == [
        [index(0, 0), index(0, 0), NO_SOURCE], [], [index(1, 2)] * 2, [NO_SOURCE, index(0, 2)]
    ]  # fmt: skip
    assert sources.of_rows([], []) == []


def test_weights_whose_updates_were_lost_are_as_old_as_the_path_to_them() -> None:
    """Version 7 with 2 lost updates counts as version 3."""
    one = row((VersionSpan(7, 0, 1, lost=2, epoch=1, replica=1),), 1)
    sources = TokenOrigins.of([one.tag], SourceBuckets.of(config()))
    assert of_row(sources, one, 6).tolist() == [sources.buckets.index(0, 3)]


@given(replicas=st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=12), order=st.randoms())
@settings(deadline=None)
def test_all_ranks_have_the_same_slots_and_no_more_than_there_are(replicas: list[list[int]], order: Any) -> None:
    tags = [
        row(tuple(VersionSpan(0, n, n + 1, replica=each) for n, each in enumerate(some)), len(some), group).tag
        for group, some in enumerate(replicas)
    ]
    sources = TokenOrigins.of(tags, SourceBuckets.of(config(replicas=3)))
    order.shuffle(tags)
    assert TokenOrigins.of(tags, SourceBuckets.of(config(replicas=3))) == sources
    known = sorted({each for some in replicas for each in some})
    assert sorted(sources.slot_of) == known[-6:], "the newest replicas have a slot"
    assert sorted(sources.slot_of.values()) == list(range(len(sources.slot_of)))


def test_the_number_of_buckets_is_bounded_and_what_has_none_is_counted() -> None:
    buckets = SourceBuckets.of(config(replicas=2, staleness=1000))
    assert (buckets.slots, buckets.lags, buckets.size) == (5, MOST_LAGS, 5 * MOST_LAGS)
    assert buckets.index(1, 10**6) == buckets.index(1, MOST_LAGS - 1) < buckets.size
    many = [row((VersionSpan(0, 0, 1, replica=number),), 1, number) for number in range(9)]
    sources = TokenOrigins.of([each.tag for each in many], SourceBuckets.of(config()))
    gaps = OriginGaps.zeros(sources.buckets.size)
    for each in many:
        bucket_R = of_row(sources, each, 0)
        gaps.add(torch.zeros(1), torch.full((1,), 0.5), torch.ones(1, dtype=torch.bool), bucket_R)
    compared = sources.compare(gaps)
    assert compared.whole.tokens == 9 == compared.by_lag[0].tokens
    assert sorted(compared.by_replica) == [5, 6, 7, 8]


def test_lags_and_replicas_are_told_apart() -> None:
    one = row((VersionSpan(3, 0, 2, replica=0), VersionSpan(6, 2, 5, replica=1)), 5)
    sources = TokenOrigins.of([one.tag], SourceBuckets.of(config()))
    gaps = OriginGaps.zeros(sources.buckets.size)
    trainer_R = torch.tensor([0.4, 0.2, 0.0, 0.3, 0.0])
    gaps.add(torch.zeros(5), trainer_R, torch.tensor([1, 1, 1, 1, 0]), of_row(sources, one, 6))
    compared = sources.compare(gaps)
    assert {lag: gap.tokens for lag, gap in compared.by_lag.items()} == {0: 2, 3: 2}
    found = compared.by_replica
    assert {replica: list(by_lag) for replica, by_lag in found.items()} == {0: [3], 1: [0]}
    assert found[0][3].logprob_abs_diff == pytest.approx(0.3) and found[1][0].logprob_abs_diff == pytest.approx(0.15)


def test_an_unknown_replica_is_not_one_of_the_tag() -> None:
    one = row((VersionSpan(0, 0, 1), VersionSpan(0, 1, 2, replica=3)), 2)
    assert one.tag.replicas == [3]
    assert replace(one, versions=one.versions[:1]).tag.replicas == []
