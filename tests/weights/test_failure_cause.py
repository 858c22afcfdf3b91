"""Who is to blame, from reports alone."""

from __future__ import annotations

from typing import Any

from megarl.weights.failure_cause import FailedCall, Verdict, find_culprits

T, A, B = "trainer rank 0", "engine replica 0 worker 0", "engine replica 1 worker 0"


def report(member: str, failure: str, *, secondary: bool = False, waited_for: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"member": member, "failure": failure, "secondary": secondary, "culprits": list(waited_for)}


def test_an_own_failure_outweighs_what_others_saw_of_it() -> None:
    reports = [
        report(T, "lost its connection", secondary=True),
        report(A, "waited for B", waited_for=(B,)),
        report(B, "bad digest"),
    ]
    assert find_culprits(reports, []) == Verdict((B,), (f"{B}: bad digest",))


def test_a_dead_replica_is_named_with_an_own_failure_elsewhere() -> None:
    calls = [FailedCall("engine replica 0", "the actor died", silent=False)]
    assert find_culprits([report(B, "bad digest")], calls).culprits == (B, "engine replica 0")


def test_of_those_waiting_for_each_other_the_silent_one_is_named() -> None:
    reports = [report(T, "T waited for B", waited_for=(B,)), report(A, "A waited for T, B", waited_for=(T, B))]
    assert find_culprits(reports, [FailedCall("engine replica 1", "no answer", silent=True)]) == Verdict(
        (B,), ("T waited for B", "A waited for T, B")
    )


def test_a_circle_of_waits_names_all() -> None:
    reports = [report(T, "T waited for A", waited_for=(A,)), report(A, "A waited for T", waited_for=(T,))]
    assert set(find_culprits(reports, []).culprits) == {T, A}


def test_a_silent_replica_is_named_if_nobody_else_is() -> None:
    call = FailedCall("engine replica 1", "no answer", silent=True)
    assert find_culprits([report(T, "lost its connection", secondary=True)], [call]).culprits == (call.replica,)
    assert find_culprits([report(A, "bad digest")], [call]).culprits == (A,)


def test_lost_connections_alone_name_nobody() -> None:
    reports = [report(T, "T lost its connection", secondary=True), report(A, "released", secondary=True)]
    assert find_culprits(reports, []) == Verdict((), ("T lost its connection",))
