"""The order of gathers and broadcasts, for any plan and any number of owners."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from megarl.weights.plan.buckets import BUFFERS, Bucket, BucketPlan, TensorSpec, bucket_plan, schedule

BUCKET_BYTES = 80  # at most 64 bytes of payload

tensors = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=40)


def plan_of(rows: list[tuple[int, int]]) -> BucketPlan:
    specs = [TensorSpec(f"t{number}", (size,), "float32", owner) for number, (owner, size) in enumerate(rows)]
    return bucket_plan(specs, BUCKET_BYTES, None)


def owned(plan: BucketPlan, owner: int) -> list[Bucket]:
    return [bucket for bucket in plan.buckets if bucket.owner == owner]


@given(tensors)
def test_each_bucket_is_gathered_once_and_then_broadcast_once_in_the_plans_order(rows: list[tuple[int, int]]) -> None:
    plan = plan_of(rows)
    order = schedule(plan)
    assert [each.bucket for each in order if each.kind == "broadcast"] == list(plan.buckets)
    gathered = [each.bucket for each in order if each.kind == "gather"]
    for owner in plan.owners:
        assert [bucket for bucket in gathered if bucket.owner == owner] == owned(plan, owner)
    places = {(each.kind, each.bucket.index): place for place, each in enumerate(order)}
    assert len(places) == len(order) == 2 * len(plan.buckets)
    assert all(places["gather", index] < places["broadcast", index] for index in range(len(plan.buckets)))


@given(tensors)
def test_no_owner_needs_more_buffers_than_it_has(rows: list[tuple[int, int]]) -> None:
    """A buffer is occupied from its gather to the end of its broadcast. When one begins, those before it have ended.

    A ring suffices: the buckets that are occupied at one time follow each other.
    """
    plan = plan_of(rows)
    occupied: dict[int, list[Bucket]] = {owner: [] for owner in plan.owners}
    running: Bucket | None = None
    for operation in schedule(plan):
        bucket = operation.bucket
        if operation.kind == "gather":
            occupied[bucket.owner].append(bucket)
        else:
            if running is not None:
                occupied[running.owner].remove(running)
            running = bucket
        for owner, held in occupied.items():
            mine = owned(plan, owner)
            assert len(held) <= min(BUFFERS, len(mine))
            slots = Counter(mine.index(each) % min(BUFFERS, len(mine)) for each in held)
            assert all(count == 1 for count in slots.values())


@given(tensors)
def test_what_is_staged_is_as_much_as_the_buffers_allow(rows: list[tuple[int, int]]) -> None:
    """One buffer is left for the gather that runs next to a broadcast, unless every bucket has a buffer of its own."""
    plan = plan_of(rows)
    order = schedule(plan)
    first = next(place for place, each in enumerate(order) if each.kind == "broadcast")
    staged = Counter(each.bucket.owner for each in order[:first])
    for owner in plan.owners:
        count = len(owned(plan, owner))
        assert staged[owner] == (count if count <= BUFFERS else BUFFERS - 1)
    assert [each.bucket.index for each in order[:first]] == sorted(each.bucket.index for each in order[:first])


@given(tensors)
def test_while_a_bucket_is_broadcast_its_owners_next_one_is_gathered(rows: list[tuple[int, int]]) -> None:
    plan = plan_of(rows)
    order = schedule(plan)
    for owner in plan.owners:
        mine = owned(plan, owner)
        for bucket, next_one in zip(mine, mine[BUFFERS - 1 :] if len(mine) > BUFFERS else [], strict=False):
            places = [place for place, each in enumerate(order) if each.bucket == bucket and each.kind == "broadcast"]
            following = order[places[0] + 1]
            assert (following.kind, following.bucket) == ("gather", next_one)


def test_one_owner_with_two_buffers_gathers_each_bucket_alongside_the_broadcast_before_it() -> None:
    order = schedule(plan_of([(0, 16)] * 4))
    assert [f"{each.kind[0]}{each.bucket.index}" for each in order] == ["g0", "b0", "g1", "b1", "g2", "b2", "g3", "b3"]
