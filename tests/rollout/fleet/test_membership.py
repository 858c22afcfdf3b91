"""The membership of the pool against a model, and what joins and leaves around a publication."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megarl.rollout.fleet.membership import Membership


def test_a_replica_that_is_added_during_a_publication_joins_with_the_next_one() -> None:
    members = Membership([0, 1])
    assert members.begin_sync() == [] and members.members == [0, 1]
    [index] = members.reserve(1)
    assert index == 2 and members.idle == {2}
    members.started(index)
    assert members.members == [0, 1], "the sync has formed its group without it"
    members.end_sync()
    assert members.members == [0, 1, 2] and members.idle == {2}
    assert members.begin_sync() == [2]
    members.end_sync()
    assert members.begin_sync() == [] and members.idle == set()


def test_a_replica_that_is_removed_during_a_publication_is_needed_to_its_end() -> None:
    members = Membership([0, 1])
    members.begin_sync()
    members.leaving.add(1)
    assert members.members == [0, 1] and members.needed(1)
    members.end_sync()
    assert members.members == [0] and not members.needed(1)
    members.forget(1)
    assert members.all == {0} and members.reserve(1) == [2], "an index was used again"


def test_a_publication_that_is_repeated_goes_on_without_a_replica_that_left() -> None:
    members = Membership([0, 1])
    members.begin_sync()
    members.leaving.add(1)
    members.excuse(1)
    assert members.members == [0] and not members.needed(1)


class Changes(RuleBasedStateMachine):
    """Any order of starts, removals and publications."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership([0, 1])
        self.used, self.group = {0, 1}, None

    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        new = self.membership.reserve(count)
        assert len(set(new)) == count and not set(new) & self.used
        self.used |= set(new)

    @precondition(lambda self: self.membership.starting)
    @rule(data=st.data(), up=st.booleans())
    def start(self, data: st.DataObject, up: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.membership.starting)))
        (self.membership.started if up else self.membership.not_started)(index)

    @precondition(lambda self: self.membership.all - self.membership.leaving)
    @rule(data=st.data(), drain=st.booleans())
    def drain_or_leave(self, data: st.DataObject, drain: bool) -> None:
        index = data.draw(st.sampled_from(sorted(self.membership.all - self.membership.leaving)))
        (self.membership.drained if drain else self.membership.leaving).add(index)

    @precondition(lambda self: self.membership.leaving)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.membership.leaving)))
        if not self.membership.needed(index):
            self.membership.forget(index)

    @rule()
    def begin(self) -> None:
        before = set(self.membership.new)
        joining = self.membership.begin_sync()
        self.group = self.membership.members
        assert set(joining) == before & set(self.group)
        assert set(self.group) == self.membership.all - self.membership.leaving

    @rule()
    def publish(self) -> None:
        self.membership.end_sync()
        self.group = None

    @invariant()
    def a_group_does_not_change_and_nobody_leaves_it_early(self) -> None:
        members = self.membership
        if self.group is not None:
            assert members.members == self.group
            assert set(self.group) <= members.all, "an engine ended in the middle of its publication"
        assert not members.starting & members.all and members.new | members.drained | members.leaving <= members.all
        assert members.idle <= members.all | members.starting


TestChanges = Changes.TestCase
TestChanges.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_the_numbers_of_engines_that_have_ended_are_left_out() -> None:
    members = Membership([0, 1])
    members.leave_out([0, 1, 4, 2])
    members.leave_out([])
    assert members.reserve(2) == [5, 6]
