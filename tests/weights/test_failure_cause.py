"""Who is to blame, from reports alone."""

from __future__ import annotations

from typing import Any

from megarl.weights.failure_cause import FailedCall, FailureCause, find_cause

T, A, B = "trainer rank 0", "engine replica 0 worker 0", "engine replica 1 worker 0"


def report(member: str, failure: str, *, secondary: bool = False, waited_for: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"member": member, "failure": failure, "secondary": secondary, "failed_members": list(waited_for)}


def test_an_own_failure_outweighs_what_others_saw_of_it() -> None:
    reports = [
        report(T, "lost its connection", secondary=True),
        report(A, "waited for B", waited_for=(B,)),
        report(B, "bad digest"),
    ]
    assert find_cause(reports, []) == FailureCause((B,), (f"{B}: bad digest",))


def test_a_dead_replica_is_named_with_an_own_failure_elsewhere() -> None:
    calls = [FailedCall("engine replica 0", "the actor died", silent=False)]
    assert find_cause([report(B, "bad digest")], calls).failed_members == (B, "engine replica 0")


def test_of_those_waiting_for_each_other_the_silent_one_is_named() -> None:
    reports = [report(T, "T waited for B", waited_for=(B,)), report(A, "A waited for T, B", waited_for=(T, B))]
    assert find_cause(reports, [FailedCall("engine replica 1", "no answer", silent=True)]) == FailureCause(
        (B,), ("T waited for B", "A waited for T, B")
    )


def test_a_circle_of_waits_names_all() -> None:
    reports = [report(T, "T waited for A", waited_for=(A,)), report(A, "A waited for T", waited_for=(T,))]
    assert set(find_cause(reports, []).failed_members) == {T, A}


def test_a_silent_replica_is_named_if_nobody_else_is() -> None:
    call = FailedCall("engine replica 1", "no answer", silent=True)
    assert find_cause([report(T, "lost its connection", secondary=True)], [call]).failed_members == (call.replica,)
    assert find_cause([report(A, "bad digest")], [call]).failed_members == (A,)


def test_lost_connections_alone_name_nobody() -> None:
    reports = [report(T, "T lost its connection", secondary=True), report(A, "released", secondary=True)]
    assert find_cause(reports, []) == FailureCause((), ("T lost its connection",))
