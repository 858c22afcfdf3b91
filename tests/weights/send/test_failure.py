"""The members that caused a failure are named, from their answers and the failed calls alone."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.group.stage import Answer
from megarl.weights.send.failure import FailedCall, FailureCause, find_cause, stuck_members, waits_of

T, U, A, B = "trainer rank 0", "trainer rank 1", "engine replica 0 worker 0", "engine replica 1 worker 0"


WAITED: Any = {"failure": "waited", "secondary": True}
LOST: Any = {"failure": "T lost its connection", "secondary": True}


def failed(member: str, failure: str) -> Answer:
    return Answer(member, "loads", failure=failure)


def test_an_own_failure_outweighs_what_others_saw_of_it() -> None:
    answers = [Answer(A, "the broadcast of bucket 1", bucket=0, expired=True), Answer(T, "x", **LOST)]
    assert find_cause([*answers, failed(B, "bad digest")], [], [T, A, B]) == FailureCause((B,), (f"{B}: bad digest",))


def test_a_dead_replica_is_named_with_an_own_failure_elsewhere() -> None:
    calls = [FailedCall("engine replica 0", "the actor died", silent=False)]
    assert find_cause([failed(B, "bad digest")], calls).failed_members == (B, "engine replica 0")


def test_of_those_waiting_for_each_other_the_silent_one_is_named() -> None:
    answers = [
        Answer(T, "the broadcast of bucket 3", bucket=2, entered=3, seconds=4.0, expired=True, **WAITED),
        Answer(A, "the broadcast of bucket 4", bucket=3, entered=4, seconds=3.0),
    ]
    calls = [FailedCall("engine replica 1", "no answer", silent=True)]
    cause = find_cause(answers, calls, [T, A, B])
    assert cause == FailureCause(
        (B,),
        (
            f"{T} waited 4.0 s for {B} in the broadcast of bucket 3",
            f"{A} waited 3.0 s for {B} in the broadcast of bucket 4",
        ),
    )


def test_a_rank_that_hangs_in_a_gather_is_named_through_the_rank_that_waits_for_it() -> None:
    answers = [
        Answer(T, "the gather of bucket 2", waits_for=(U,), entered=1, seconds=4.9, expired=True, **WAITED),
        Answer(U, "packing its part of bucket 2", seconds=5.0),
        Answer(A, "the broadcast of bucket 2", bucket=1, entered=2, seconds=4.9, expired=True),
    ]
    cause = find_cause(answers, [], [T, A])
    assert cause.failed_members == (U,)
    assert cause.reasons == (
        f"{T} waited 4.9 s for {U} in the gather of bucket 2",
        f"{U}: packing its part of bucket 2 (for 5.0 s)",
    )


def test_a_circle_of_waits_names_nobody_and_tells_all_waits() -> None:
    answers = [Answer(T, "x", waits_for=(A,), expired=True, **WAITED), Answer(A, "y", waits_for=(T,))]
    cause = find_cause(answers, [])
    assert cause.failed_members == ()
    assert cause.reasons == ("waited", f"{T} waited 0.0 s for {A} in x", f"{A} waited 0.0 s for {T} in y")


def test_without_an_expired_deadline_a_member_at_work_is_not_named() -> None:
    """A connection was lost in the middle of a sync: that others wait for a member then says nothing against it."""
    assert find_cause([Answer(T, "x", waits_for=(A,), **LOST), Answer(A, "loads")], []).failed_members == ()


def test_a_silent_replica_is_named_if_nobody_else_is() -> None:
    call = FailedCall("engine replica 1", "no answer", silent=True)
    assert find_cause([Answer(T, "x", **LOST)], [call]).failed_members == (call.replica,)
    assert find_cause([failed(A, "bad digest")], [call]).failed_members == (A,)


def test_lost_connections_alone_name_nobody() -> None:
    answers = [Answer(T, "x", **LOST), Answer(A, "y", failure="released", secondary=True)]
    assert find_cause(answers, []) == FailureCause((), ("T lost its connection",))


@st.composite
def acyclic_waits(draw: st.DrawFn) -> tuple[dict[str, tuple[str, ...]], bool]:
    """Waits of m1, m2, ... that lead to m0 in any order, and of nobody for the members `idle`; is m0 silent?"""
    count = draw(st.integers(2, 12))
    waits: dict[str, tuple[str, ...]] = {}
    for number in range(1, count):
        earlier = draw(st.lists(st.integers(0, number - 1), min_size=1, max_size=number, unique=True))
        waits[f"m{number}"] = tuple(f"m{each}" for each in earlier)
    silent = draw(st.booleans())
    if not silent:
        waits["m0"] = ()
    for number in range(draw(st.integers(0, 3))):
        waits[f"idle{number}"] = ()
    order = draw(st.permutations(list(waits)))
    return {name: waits[name] for name in order}, silent


@settings(max_examples=300, deadline=None)
@given(acyclic_waits())
def test_in_any_waits_without_a_circle_the_stuck_member_alone_is_named(
    case: tuple[dict[str, tuple[str, ...]], bool],
) -> None:
    waits, silent = case
    assert stuck_members(waits) == ("m0",)
    answers = [Answer(name, "a gather", waits_for=names, expired=bool(names)) for name, names in waits.items()]
    assert find_cause(answers, []).failed_members == ("m0",)
    assert silent == ("m0" not in {answer.member for answer in answers})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=10), st.data())
def test_in_broadcasts_those_are_named_that_are_furthest_behind_and_do_not_wait(
    behind: list[int], data: st.DataObject
) -> None:
    """Member i takes part in all broadcasts up to the one it waits in; one that is stuck has begun the fewest."""
    names = [f"m{number}" for number in range(len(behind))]
    stuck = data.draw(st.sampled_from(names))
    fewest = min(behind)
    answers = [
        Answer(name, "loads", entered=fewest)
        if name == stuck
        else Answer(name, "a broadcast", bucket=fewest + extra, entered=fewest + extra + 1, expired=True)
        for name, extra in zip(names, behind, strict=True)
    ]
    assert stuck_members(waits_of(answers, names)) == (stuck,)
    without = [answer for answer in answers if answer.member != stuck]
    assert stuck_members(waits_of(without, names)) == (stuck,), "a silent member has begun nothing that is known"


@given(st.integers(2, 8), st.data())
def test_a_member_that_waits_is_never_named(count: int, data: st.DataObject) -> None:
    names = [f"m{number}" for number in range(count)]
    waits = {name: tuple(data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True))) for name in names}
    assert not [name for name in stuck_members(waits) if waits[name]]


def test_a_wait_for_engines_that_were_not_asked_yet_is_nobodys_failure() -> None:
    """The deadline has passed while the engines were being paused: both ranks have done their part."""
    answers = [
        Answer(T, "the broadcast of bucket 1", bucket=0, entered=1, seconds=5.0, expired=True, **WAITED),
        Answer(U, "the gather of bucket 2", waits_for=(T,), entered=1, seconds=2.0),
    ]
    cause = find_cause(answers, [], [T, U, A], uncalled=[A])
    assert cause.failed_members == ()
    assert f"{T} waited 5.0 s for {A} in the broadcast of bucket 1" in cause.reasons
    assert find_cause(answers, [], [T, U, A]).failed_members == (A,)
