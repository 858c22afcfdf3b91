"""Batches between admission and commit: keys of all samples, the counters of the moment, one batch per step."""

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission
from megarl.rollout.orchestrator.step_batches import ready_batch

SAMPLES = 3


def keys(samples: int) -> dict[int, list[str]]:
    """The keys of groups that have one row per sample."""
    return {group: [f"{group}:{index}" for index in range(samples)] for group in range(20)}


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
