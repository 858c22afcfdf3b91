"""Batches between admission and commit: keys of all samples, the counters of the moment, one batch per step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission
from megarl.rollout.orchestrator.ready_batches import ready_batch

SAMPLES = 3


def keys(samples: int) -> dict[int, list[str]]:
    """The keys of groups that have one row per sample."""
    return {group: [f"{group}:{index}" for index in range(samples)] for group in range(20)}


def ready(groups: int, order: list[int], failed: set[int], *, staleness: int = 0) -> Admission:
    """Return an admission whose groups have finished in `order`; those in `failed` cannot be trained on."""
    admission = Admission(groups, Pace(max_staleness=staleness))
    admission.set_version(0)
    admission.admit()
    for group in order:
        admission.finish(group, ok=group not in failed)
    return admission


@given(st.permutations(range(4)), st.sets(st.integers(0, 3)))
def test_keys_are_those_of_all_samples_by_group_and_sample(order: list[int], failed: set[int]) -> None:
    batch = ready_batch(0, ready(4, order, failed), keys(SAMPLES), {"rollout/replicas_alive": 2.0})
    assert batch.keys == [f"{group}:{index}" for group in range(4) for index in range(SAMPLES)]
    assert (batch.step, batch.counters.taken, batch.counters.balanced) == (0, 4, True)
    assert batch.timings == {
        "rollout/replicas_alive": 2.0,
        "rollout/queue_depth": 0,
        "total/groups_rolled_back": 0,
    }


def test_the_groups_that_finished_first_are_taken_and_the_others_wait_in_the_queue() -> None:
    batch = ready_batch(0, ready(2, [3, 0, 2], set(), staleness=1), keys(1), {})
    assert batch.keys == ["0:0", "3:0"] and batch.timings["rollout/queue_depth"] == 1
    assert batch.counters.in_flight == 1


def test_rolled_back_groups_are_reported_with_every_batch() -> None:
    admission = Admission(2, Pace())
    admission.load_state_dict(admission.state_dict(), attempts=5)
    admission.set_version(0)
    for group in admission.admit():
        admission.finish(group, ok=True)
    assert ready_batch(0, admission, keys(1), {}).timings["total/groups_rolled_back"] == 5


def test_replaced_groups_are_reported_with_the_batch_that_they_were_replaced_before() -> None:
    admission = Admission(2, Pace(), refill=4)
    admission.set_version(0)
    admission.admit()
    assert admission.replace(1, [0]) and admission.replace(0, [0])
    for group in admission.admit():
        admission.finish(group, ok=True)
    batch = ready_batch(0, admission, keys(1), {})
    assert (batch.keys, batch.replaced, batch.counters.taken) == (["2:0", "3:0"], [0, 1], 4)
    assert (batch.timings["rollout/groups_replaced"], batch.timings["rollout/groups_replaced_share"]) == (2, 0.5)


def test_groups_that_are_used_again_are_part_of_the_batch_and_no_new_ones() -> None:
    admission = Admission(2, Pace(max_staleness=3), max_uses=2)
    admission.set_version(0)
    admission.admit()
    for group in (1, 3, 2):
        admission.finish(group, ok=True)
    queued = keys(2)
    first = ready_batch(0, admission, queued, {})
    assert (first.groups, first.reused, first.timings["rollout/groups_reusable"]) == ([1, 3], [], 0)
    admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0, trained_groups=[1, 3])
    second = ready_batch(1, admission, queued, {})
    assert (second.groups, second.reused) == ([2], [1])
    assert second.keys == ["1:0", "1:1", "2:0", "2:1"] and second.timings["rollout/groups_reusable"] == 1


def test_the_share_of_replaced_groups_is_that_of_the_new_ones() -> None:
    """Two groups finished before step 1, and one of them was replaced; the other group of the batch is used again."""
    admission = Admission(2, Pace(max_staleness=3), refill=4, max_uses=2)
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2, 3]
    for group in (0, 1):
        admission.finish(group, ok=True)
    queued = keys(1)
    ready_batch(0, admission, queued, {})
    admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0, trained_groups=[0, 1])
    assert admission.replace(2, [0])
    admission.finish(3, ok=True)
    batch = ready_batch(1, admission, queued, {})
    assert (batch.groups, batch.replaced, batch.reused) == ([3], [2], [0])
    assert batch.timings["rollout/groups_replaced_share"] == 1 / 2


def test_a_step_whose_groups_are_not_ready_has_no_batch() -> None:
    queued = keys(SAMPLES)
    with pytest.raises(ValueError, match="the groups of step 0 are not ready"):
        ready_batch(0, ready(2, [0], set()), queued, {})
