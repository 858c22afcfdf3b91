"""The record of each replica: every change of its state, and the table against a model in any order of changes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megarl.common.errors import ReplicaFailed
from megarl.rollout.fleet.replica_table import Replica, ReplicaTable, State


def client() -> Any:
    return SimpleNamespace(where="see its log", close=lambda: None)


def table_of(count: int = 2, *, replaces: bool = True) -> ReplicaTable:
    return ReplicaTable({index: client() for index in range(count)}, replaces=replaces)


def indices(replicas: list[Replica]) -> list[int]:
    return [each.index for each in replicas]


def lose(table: ReplicaTable, index: int = 1) -> None:
    table.lose(index, ReplicaFailed(index, f"replica {index} died"))


def restart(table: ReplicaTable, index: int = 1) -> None:
    table.restarting(index)
    table.restarted(table[index], client())


CHANGES: dict[str, Callable[[ReplicaTable], object]] = {
    "lose": lose,
    "drain": lambda table: table.drain(1),
    "undrain": lambda table: table.undrain(1),
    "leave": lambda table: table.leave(1),
    "join": lambda table: table.join(1),
    "begin": lambda table: table.begin_sync(),
    "admit": lambda table: table.admit(),
    "restarting": lambda table: table.restarting(1),
    "restarted": lambda table: table.restarted(table[1], client()),
    "not restarted": lambda table: table.not_restarted(table[1], ReplicaFailed(1, "no GPU is free")),
}


@pytest.mark.parametrize(
    ("changes", "state", "does"),
    [
        ("", State.READY, "serving"),
        ("lose", State.LOST, "lost"),
        ("lose, begin, admit", State.LOST, "lost"),
        ("lose, join", State.JOINING, "joining"),
        ("lose, join, admit", State.READY, "serving"),
        ("join, admit", State.READY, "serving"),
        ("drain", State.READY, "drained"),
        ("drain, begin, admit", State.READY, "drained"),
        ("drain, undrain", State.NEW, "joining"),
        ("drain, undrain, admit", State.NEW, "joining"),
        ("drain, undrain, begin, admit", State.READY, "serving"),
        ("drain, lose, undrain", State.LOST, "lost"),
        ("drain, lose, join, admit", State.READY, "drained"),
        ("drain, restarting, restarted, admit", State.READY, "drained"),
        ("restarting", State.RESTARTING, "joining"),
        ("restarting, lose", State.RESTARTING, "joining"),
        ("restarting, join", State.RESTARTING, "joining"),
        ("lose, restarting, restarted", State.JOINING, "joining"),
        ("lose, restarting, restarted, admit", State.READY, "serving"),
        ("restarting, not restarted", State.LOST, "lost"),
        ("restarting, not restarted, admit", State.LOST, "lost"),
        ("leave", State.READY, "leaving"),
        ("lose, leave", State.LOST, "leaving"),
        ("leave, lose", State.READY, "leaving"),
        ("restarting, leave", State.RESTARTING, "leaving"),
        ("restarting, leave, not restarted", State.LOST, "leaving"),
        ("restarting, leave, restarted, admit", State.READY, "leaving"),
    ],
)
def test_each_change(changes: str, state: State, does: str) -> None:
    table = table_of()
    before = table[1].lease()
    for change in filter(None, changes.split(", ")):
        CHANGES[change](table)
    replica = table[1]
    assert (replica.state, replica.does) == (state, does)
    assert replica.serves == (does == "serving") and indices(table.serving) == ([0, 1] if replica.serves else [0])
    assert (1 in table.lost) == (replica.failure is not None) and (not replica.serves or replica.failure is None)
    withdrawn = any(change in changes for change in ("lose", "drain", "leave", "restarting"))
    assert before.valid is not withdrawn and (before.ended is not None) is withdrawn


@pytest.mark.parametrize(
    ("changes", "reason", "drained"),
    [
        ("lose", "replica 1 died", False),
        ("drain", "replica 1 is drained", True),
        ("leave", "replica 1 is drained", True),
        ("drain, lose", "replica 1 died", True),
        ("restarting, restarted", "replica 1 has been replaced", False),
        ("lose, join, admit", "replica 1 was lost, and serves again without its earlier requests", False),
    ],
)
def test_a_lease_tells_why_it_has_ended_and_its_load_counts_no_more(changes: str, reason: str, drained: bool) -> None:
    table = table_of()
    lease = table[1].lease()
    table[1].load, table[1].limit = 7, 3.0
    for change in changes.split(", "):
        CHANGES[change](table)
    assert str(lease.ended) == reason and lease.drained is drained
    assert (table[1].load, table[1].limit) == (0, float("inf"))


def test_the_last_one_lost_is_named_also_after_a_restart_that_failed() -> None:
    table = table_of(3)
    for index in (2, 0, 1):
        lose(table, index)
    assert list(table.lost) == [2, 0, 1] and str(table.none_left("late: ")) == "late: replica 1 died"
    CHANGES["restarting"](table)
    table.restarting(2)
    table.not_restarted(table[2], ReplicaFailed(2, "no GPU"))
    assert list(table.lost) == [0, 1, 2] and str(table.none_left()) == "no GPU"
    for index in range(3):
        table.give_up(index)
    assert str(table.none_left()) == "all replicas have left the pool" and table.missing == 3


@pytest.mark.parametrize("replaces", [True, False])
def test_a_replica_is_coming_in_a_sync_while_it_is_replaced_and_if_the_trainer_can_be_asked(replaces: bool) -> None:
    table = table_of(1, replaces=replaces)
    lose(table, 0)
    assert not table.coming
    table.expects = True
    assert table.coming is replaces and not table.under_way
    table.begin_sync()
    assert table.under_way is table.sync_replaces is replaces
    table.end_sync()
    table.restarting(0)
    assert table.under_way
    table.not_restarted(table[0], ReplicaFailed(0, "no"))
    assert not table.under_way
    table.join(0)
    assert table.under_way
    table.admit()
    assert not table.under_way and table.lost == {}


def test_what_can_be_quarantined() -> None:
    table = table_of()
    done, text = table.quarantine(1, "alarm")
    assert done and "until the next publication" in text and table[1].condemned
    assert str(table.lost[1]) == "replica 1 was quarantined by the trainer: alarm; see its log"
    gone = "does not serve; the next publication readmits or replaces it"
    assert table.quarantine(1, "alarm") == (False, f"replica 1 {gone}")
    assert table.quarantine(7, "alarm") == (False, f"replica 7 {gone}")
    assert table.quarantine(0, "alarm") == (False, "replica 0 stays, because no other replica serves training")
    restart(table)
    assert not table[1].condemned


def test_the_numbers_of_engines_that_have_ended_are_left_out() -> None:
    table = table_of()
    table.leave_out([0, 1, 4, 2])
    table.leave_out([])
    assert table.reserve(2) == [5, 6]


class Changes(RuleBasedStateMachine):
    """Any order of starts, losses, restarts, removals and publications."""

    def __init__(self) -> None:
        super().__init__()
        self.table = table_of()
        self.used, self.group = {0, 1}, None

    def some(self, data: st.DataObject, allowed: Callable[[Replica], bool]) -> int | None:
        found = [each.index for each in self.table if allowed(each)]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        new = self.table.reserve(count)
        assert len(set(new)) == count and not set(new) & self.used
        self.used |= set(new)

    @rule(data=st.data(), up=st.booleans())
    def start(self, data: st.DataObject, up: bool) -> None:
        if (index := self.some(data, lambda each: each.state is State.STARTING)) is None:
            return
        if up:
            self.table.started(index, client())
        else:
            self.table.forget(index)

    @rule(data=st.data(), change=st.sampled_from(["lose", "drain", "undrain", "leave", "join", "restarting"]))
    def change(self, data: st.DataObject, change: str) -> None:
        index = self.some(data, lambda each: each.client is not None and not each.leaving)
        if index is None:
            return
        if change == "lose":
            lose(self.table, index)
        else:
            getattr(self.table, change)(index)

    @rule(data=st.data(), up=st.booleans())
    def restart(self, data: st.DataObject, up: bool) -> None:
        if (index := self.some(data, lambda each: each.state is State.RESTARTING)) is None:
            return
        if up:
            self.table.restarted(self.table[index], client())
        else:
            self.table.not_restarted(self.table[index], ReplicaFailed(index, "no"))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = self.some(data, lambda each: each.leaving and not each.published and not each.coming)
        if index is not None:
            self.table.forget(index)

    @rule()
    def begin(self) -> None:
        new = {each.index for each in self.table if each.state is State.NEW and not each.leaving}
        self.table.begin_sync()
        self.group = indices(self.table.members)
        assert new <= set(self.group) and all(self.table[index].state is State.JOINING for index in new)

    @precondition(lambda self: self.group is not None)
    @rule(complete=st.booleans())
    def publish(self, complete: bool) -> None:
        (self.table.admit if complete else self.table.end_sync)()
        self.group = None
        assert not complete or not any(each.state is State.JOINING for each in self.table)

    @invariant()
    def a_group_does_not_change_and_nobody_leaves_it_early(self) -> None:
        if self.group is not None:
            assert indices(self.table.members) == self.group, "an engine ended in the middle of its publication"

    @invariant()
    def each_replica_is_one_thing(self) -> None:
        for each in self.table:
            assert not each.serves or (each.failure is None and each.client is not None)
            assert each.lost == (each.does == "lost" or (each.does == "joining" and each.index in self.table.lost))
            assert (each.client is None) == (each.state is State.STARTING)
            assert each.load == 0 and not (each.state is State.LOST and each.failure is None and not each.leaving)


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
