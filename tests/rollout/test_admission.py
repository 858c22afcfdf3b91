"""Admission: every group ends once, counters add up at every step, resume redraws the same ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.pace import Pace
from megarl.rollout.admission import Admission, usable_samples
from tests.support.admission_machine import AdmissionMachine
from tests.support.admission_states import explore

SYNC = Pace()


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAdmission = AdmissionMachine.TestCase


class TooMuchRoom(Admission):
    """Counts one update more within the bound than there is."""

    def steps_within_bound(self, version: int) -> int:
        return super().steps_within_bound(version + 1) if self._base else 0


class NoCap(Admission):
    """Starts groups without regard to those in flight."""

    @property
    def room(self) -> int:
        return super().room + len(self._in_flight)


class NoWait(Admission):
    """Takes a batch while a group that can train in no later step is in flight."""

    def awaited(self, step: int) -> list[int]:
        return []


class NewestFirst(Admission):
    """Takes the groups with the newest tokens first."""

    def _oldest_ready(self) -> Iterator[tuple[int, list[int]]]:
        missing = self.groups
        for version in sorted(self._ready, reverse=True):
            groups = list(self._ready[version])[:missing]
            missing -= len(groups)
            yield version, groups


class NoRefill(Admission):
    """Starts nothing after the first publication."""

    @property
    def room(self) -> int:
        return super().room if self.version == 0 else 0


# (groups, pace, steps): a step off, many versions in flight, updates per step, and several steps per publication.
SMALL = [
    (2, Pace(), 3),
    (2, Pace(max_staleness=1), 3),
    (1, Pace(max_staleness=3), 5),
    (1, Pace(updates_per_step=2, sync_interval=2, max_staleness=3), 4),
    (2, Pace(sync_interval=2, max_staleness=1), 4),
    (1, Pace(updates_per_step=2, sync_interval=4, max_staleness=6), 4),
]


@pytest.mark.parametrize(("groups", "pace", "steps"), SMALL)
def test_every_state_of_a_small_run_keeps_the_rules(groups: int, pace: Pace, steps: int) -> None:
    """The bound, the order, the size of a batch, and that the run can always go on."""
    assert explore(Admission, groups, pace, steps) > steps


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        (TooMuchRoom, "the bound is passed"),
        (NoCap, "a second call starts groups again|the bound is passed"),
        (NoWait, "the bound is passed"),
        (NewestFirst, "an older group is left|the bound is passed"),
        (NoRefill, "deadlock"),
    ],
)
def test_each_rule_is_needed(mutant: type[Admission], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        for groups, pace, steps in SMALL:
            explore(mutant, groups, pace, steps)


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
    batches = drive(Admission(groups, SYNC), steps)
    assert batches == [list(range(step * groups, (step + 1) * groups)) for step in range(steps)]


def test_nothing_is_admitted_before_the_first_version_nor_ahead_of_it() -> None:
    admission = Admission(3, SYNC)
    assert admission.admit() == []
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2] and admission.admit() == []
    admission.set_version(0)
    assert admission.admit() == []


def test_the_next_group_is_the_first_that_was_never_started() -> None:
    machine = Admission(2, Pace())
    machine.set_version(0)
    assert machine.next_group == 0 and machine.admit() == [0, 1] and machine.next_group == 2
    machine.load_state_dict(machine.state_dict())
    assert machine.next_group == 2 and machine.unsettled == [0, 1]  # these are started again


def test_staleness_admits_ahead() -> None:
    admission = Admission(2, Pace(max_staleness=2))
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2, 3, 4, 5]


def test_resume_redraws_unsettled_groups_under_their_ids() -> None:
    admission = Admission(2, Pace(max_staleness=1))
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2, 3]
    for group in (0, 3):
        admission.finish(group, ok=True)
    assert admission.batch(0) == ([0, 3], [])
    admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0)
    admission.finish(1, ok=True)
    resumed = Admission(2, Pace(max_staleness=1))
    resumed.load_state_dict(admission.state_dict())
    resumed.set_version(1)
    assert resumed.admit() == [1, 2, 4, 5]


def test_versions_are_not_steps() -> None:
    """A history at version 7 after one step admits as much as any other."""
    admission = Admission(4, SYNC)
    admission.set_version(6)
    assert admission.admit() == [0, 1, 2, 3]
    for group in range(4):
        admission.finish(group, ok=True)
    admission.batch(0)
    admission.commit(0, trained=4, filtered=0, dropped_stale=0, failed=0)
    admission.set_version(7)
    resumed = Admission(4, SYNC)
    resumed.load_state_dict(admission.state_dict())
    assert resumed.room == 0  # the engines may have no weights yet
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
    admission = Admission(groups, SYNC)
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
    resumed = Admission(now, SYNC)
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
    admission = Admission(2, SYNC)
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
    admission = Admission(1, SYNC)
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
