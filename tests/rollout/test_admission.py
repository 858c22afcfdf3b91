"""Admission: every group ends once, counters add up at every step, resume redraws the same ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megarl.rollout.admission import Admission, usable_samples


class AdmissionMachine(RuleBasedStateMachine):
    """Random interleavings of what controller and trainer do."""

    @initialize(groups=st.integers(1, 5), staleness=st.integers(0, 3))
    def start(self, groups: int, staleness: int) -> None:
        self.admission = Admission(groups, staleness)
        self.running: list[int] = []
        self.seen: list[int] = []
        self.ended: dict[int, str] = {}
        self.version, self.step = -1, 0

    @rule()
    def new_version(self) -> None:
        if self.version < self.step:
            self.version += 1
            self.admission.set_version(self.version)

    @rule()
    def admit(self) -> None:
        new = self.admission.admit()
        assert not set(new) & set(self.seen)
        self.seen += new
        self.running += new

    @precondition(lambda self: self.running)
    @rule(data=st.data(), ok=st.booleans())
    def finish(self, data: st.DataObject, ok: bool) -> None:
        group = data.draw(st.sampled_from(self.running))
        self.running.remove(group)
        self.admission.finish(group, ok)

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        taken = self.admission.batch(self.step)
        assert taken == self.admission.batch(self.step)
        if taken is None:
            return
        ok, bad = taken
        assert len(ok) + len(bad) == self.admission.groups
        ends = [data.draw(st.sampled_from(["trained", "filtered", "dropped_stale", "failed"])) for _ in ok]
        numbers = {name: ends.count(name) for name in ("trained", "filtered", "dropped_stale")}
        self.admission.commit(self.step, **numbers, failed=ends.count("failed") + len(bad))
        for group, end in zip(ok + bad, ends + ["failed"] * len(bad), strict=True):
            assert group not in self.ended
            self.ended[group] = end
        self.step += 1

    @rule()
    def resume(self) -> None:
        state, fresh = self.admission.state_dict(), Admission(self.admission.groups, self.admission.max_staleness)
        fresh.load_state_dict(state)
        assert fresh.counters.admitted == fresh.counters.settled == len(self.ended)
        self.admission, self.running = fresh, []
        self.seen = sorted(self.ended)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "admission"):
            return
        counters = self.admission.counters
        assert counters.balanced
        assert counters.admitted == len(set(self.seen)) and counters.in_flight == len(self.running)
        assert counters.settled == len(self.ended)
        assert counters.trained == list(self.ended.values()).count("trained")
        assert counters.admitted <= max(0, self.admission.capacity)


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAdmission = AdmissionMachine.TestCase


def drive(admission: Admission, steps: int) -> list[list[int]]:
    """Complete synchronous steps; the groups of each."""
    batches = []
    for _ in range(steps):
        step = admission.state_dict()["steps"]
        admission.set_version(step)
        for group in reversed(admission.admit()):
            admission.finish(group, ok=True)
        taken = admission.batch(step)
        assert taken is not None
        batches.append(taken[0])
        admission.commit(step, trained=admission.groups, filtered=0, dropped_stale=0, failed=0)
    return batches


@given(groups=st.integers(1, 6), steps=st.integers(1, 6))
def test_synchronous_steps_take_consecutive_groups(groups: int, steps: int) -> None:
    batches = drive(Admission(groups), steps)
    assert batches == [list(range(step * groups, (step + 1) * groups)) for step in range(steps)]


def test_nothing_is_admitted_before_the_first_version_nor_ahead_of_it() -> None:
    admission = Admission(3)
    assert admission.admit() == []
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2] and admission.admit() == []
    admission.set_version(0)
    assert admission.admit() == []


def test_staleness_admits_ahead() -> None:
    admission = Admission(2, max_staleness=2)
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2, 3, 4, 5]


def test_resume_redraws_unsettled_groups_under_their_ids() -> None:
    admission = Admission(2, max_staleness=1)
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2, 3]
    for group in (0, 3):
        admission.finish(group, ok=True)
    assert admission.batch(0) == ([0, 3], [])
    admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0)
    admission.finish(1, ok=True)
    resumed = Admission(2, max_staleness=1)
    resumed.load_state_dict(admission.state_dict())
    resumed.set_version(1)
    assert resumed.admit() == [1, 2, 4, 5]


def test_versions_are_not_steps() -> None:
    """A history at version 7 after one step admits as much as any other."""
    admission = Admission(4)
    admission.set_version(6)
    assert admission.admit() == [0, 1, 2, 3]
    for group in range(4):
        admission.finish(group, ok=True)
    admission.batch(0)
    admission.commit(0, trained=4, filtered=0, dropped_stale=0, failed=0)
    admission.set_version(7)
    resumed = Admission(4)
    resumed.load_state_dict(admission.state_dict())
    assert resumed.capacity == 0  # the engines may have no weights yet
    resumed.set_version(7)
    assert resumed.admit() == [4, 5, 6, 7]


@given(
    steps=st.integers(0, 4), beyond=st.integers(0, 3), groups=st.integers(1, 4), now=st.integers(1, 6),
    kept=st.booleans(),
)  # fmt: skip
def test_what_the_checkpoint_does_not_hold_is_rolled_back(
    steps: int, beyond: int, groups: int, now: int, kept: bool
) -> None:
    """Saved after `steps` steps, killed `beyond` steps later with one more batch in flight, resumed with `now` groups
    per step: the same ids again, attempts counted whether the controller lived on or only its file did."""
    admission = Admission(groups)
    state = admission.state_dict()
    for step in range(steps + beyond + 1):
        admission.set_version(step)
        for group in admission.admit():
            admission.finish(group, ok=True)
        if step < steps + beyond:
            admission.batch(step)
            admission.commit(step, trained=groups, filtered=0, dropped_stale=0, failed=0)
        if step + 1 == steps:
            state = admission.state_dict()
    assert admission.counters.rolled_back == 0
    resumed = Admission(now)
    resumed.load_state_dict(state, admission.attempts)
    if kept:  # a second resume from the same checkpoint changes nothing
        resumed.load_state_dict(state, resumed.attempts)
    lost = (beyond + 1) * groups
    assert resumed.counters.rolled_back == lost and resumed.counters.admitted == steps * groups
    resumed.set_version(steps)
    assert resumed.admit() == list(range(steps * groups, steps * groups + now))
    counters = resumed.counters
    assert counters.balanced and counters.rolled_back == lost
    assert resumed.attempts == counters.admitted + counters.rolled_back


def test_commit_refuses_numbers_that_do_not_add_up() -> None:
    admission = Admission(2)
    admission.set_version(0)
    for group in admission.admit():
        admission.finish(group, ok=group == 0)
    assert admission.batch(0) == ([0], [1])
    for numbers in ((2, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 1), (3, 0, 0, -1)):
        with pytest.raises(ValueError, match="do not account"):
            admission.commit(0, **dict(zip(("trained", "filtered", "dropped_stale", "failed"), numbers, strict=True)))
    admission.commit(0, trained=1, filtered=0, dropped_stale=0, failed=1)
    with pytest.raises(ValueError, match="already committed"):
        admission.commit(0, trained=1, filtered=0, dropped_stale=0, failed=1)


def test_misuse_is_refused() -> None:
    admission = Admission(1)
    admission.set_version(0)
    admission.admit()
    admission.finish(0, ok=True)
    with pytest.raises(ValueError, match="not in flight"):
        admission.finish(0, ok=True)
    with pytest.raises(ValueError, match="in order"):
        admission.batch(1)
    with pytest.raises(ValueError, match="went back"):
        admission.set_version(-1)


@given(st.lists(st.sampled_from(["ok", "failed"]), max_size=8))
def test_a_group_needs_two_usable_samples(statuses: list[str]) -> None:
    assert usable_samples(statuses) == (statuses.count("ok") >= 2)
