"""Admission: every group ends once, counters add up at every step, resume redraws the same ids."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.groups_in_flight import GroupsInFlight, ReadyGroups, ReusableGroups
from tests.support.machines.admission_machine import AdmissionMachine
from tests.support.machines.admission_states import explore, steps_without_room
from tests.support.machines.admission_timeline import run_timeline
from tests.support.measures.growth import held_bytes

SYNC = Pace()


AdmissionMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestAdmission = AdmissionMachine.TestCase


# Admissions, and what they hold, each without one of the rules.

ROOM = Admission.room.fget


def without_rule(base: type = Admission, **changed: Any) -> type:
    return type("Mutant", (base,), changed)


def newest_first(self: ReadyGroups, number: int) -> Iterator[tuple[int, list[int]]]:
    for version in sorted(self._by_version, reverse=True):
        groups = list(self._by_version[version])[:number]
        number -= len(groups)
        yield version, groups


def hand_replaced_on(self: Admission, step: int) -> tuple[list[int], list[int]] | None:
    replaced = list(self._replaced)
    taken = Admission.batch(self, step)
    self._replaced = replaced
    return taken


def age_of_the_start(self: GroupsInFlight, group: int, versions: Iterable[int]) -> int:
    started = self._starts[group]
    GroupsInFlight.leave(self, group, versions)
    return started


def forget_the_end(self: Admission, step: int) -> list[int]:
    steps, self.steps = self.steps, None
    try:
        return Admission.awaited(self, step)
    finally:
        self.steps = steps


def settle_reused(self: Admission, step: int, **numbers: Any) -> None:
    Admission.commit(self, step, **numbers)
    self._done["trained"] += numbers["reused"]


def replace_all(self: Admission, group: int, versions: Iterable[int]) -> bool:
    self._in_flight.leave(group, versions)
    self._replaced.append(group)
    return True


TOO_MUCH_ROOM = without_rule(
    steps_within_bound=lambda self, version: Admission.steps_within_bound(self, version + 1) if self._base else 0
)
NO_CAP = without_rule(room=property(lambda self: ROOM(self) + len(self._in_flight)))
NO_WAIT = without_rule(awaited=lambda self, step: [])
NEWEST_FIRST = without_rule(ReadyGroups, first=newest_first)
NOTHING_NEW = without_rule(room=property(lambda self: ROOM(self) if self.version == 0 else 0))
NO_REFILL = without_rule(room=property(lambda self: max(0, ROOM(self) - len(self._replaced))))
NO_REFILL_LIMIT = without_rule(replace=replace_all)
LIMIT_OF_THE_RUN = without_rule(  # and not of a step
    replace=lambda self, *group: self._done["filtered"] < self.refill and Admission.replace(self, *group)
)
FORGETS_REPLACED = without_rule(batch=lambda self, step: self._replaced.clear() or Admission.batch(self, step))
SETTLES_REPLACED_TWICE = without_rule(batch=hand_replaced_on)
TRAINS_FAILED = without_rule(finish=lambda self, group, ok, versions=(): Admission.finish(self, group, True, versions))
AGE_OF_THE_START = without_rule(GroupsInFlight, leave=age_of_the_start)
NO_PLACE_FOR_REUSE = without_rule(room=property(lambda self: self._room_at(self.version)))
CROWDS_OUT = without_rule(
    awaited=lambda self, step: [] if len(self._ready) < self.groups else Admission.awaited(self, step)
)
FORGETS_THE_END = without_rule(awaited=forget_the_end)
ONLY_OLD_GROUPS = without_rule(_fills_up=lambda self, missing: not self._taken and len(self._reusable) >= missing)
FILLS_UP_FAILED = without_rule(
    _fills_up=lambda self, missing: not self._taken and len(self._ready) > 0 and len(self._reusable) >= missing
)
REUSES_EARLY = without_rule(_fills_up=lambda self, missing: self._ready.any_ok and len(self._reusable) >= missing)
REUSES_TOO_OLD = without_rule(_usable=lambda self, version: True)
REUSES_FILTERED = without_rule(
    _uses_after=lambda self, step, trained: Admission._uses_after(self, step, self._taken[step].ok)
)
SETTLES_REUSED = without_rule(commit=settle_reused)
KEEPS_ROWS = without_rule(  # of a single group
    take_released=lambda self: found if len(found := Admission.take_released(self)) != 1 else []
)
ENDLESS = without_rule(ReusableGroups, keep=lambda self, group, use: not self._groups.update({group: use}))
MOST_USED_FIRST = without_rule(ReusableGroups, _order=staticmethod(lambda group, use: (-use.uses, use.oldest, group)))
YOUNGEST_FIRST = without_rule(ReusableGroups, _order=staticmethod(lambda group, use: (use.uses, -use.oldest, group)))


def take_as_if_beside(self: Admission, step: int) -> tuple[list[int], list[int]] | None:
    turns, self.pace = self.pace, replace(self.pace, in_turns=False)
    try:
        return Admission.batch(self, step)
    finally:
        self.pace = turns


TAKES_EARLY = without_rule(batch=take_as_if_beside)
NO_WAIT_FOR_ROOM = without_rule(batch=lambda self, step: None if self._in_flight else take_as_if_beside(self, step))
PAST_THE_PUBLICATION = without_rule(_end=lambda self, version: self.steps_within_bound(version))


def holding(
    reusable: type[ReusableGroups] = ReusableGroups,
    ready: type[ReadyGroups] = ReadyGroups,
    in_flight: type[GroupsInFlight] = GroupsInFlight,
) -> type[Admission]:
    """An admission whose groups for further uses, finished groups or groups in flight are of another kind."""

    class Holding(Admission):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._reusable = reusable(self.max_uses)
            self._ready, self._in_flight = ready(), in_flight()

    return Holding


@dataclass(frozen=True)
class Small:
    """A run whose states can all be visited.

    `steps`: the number of its steps, which admission knows if `ends`. `plain`: see `successors`; its states would else
    be too many.
    """

    groups: int
    pace: Pace
    steps: int
    refill: int = 0
    max_uses: int = 1
    ahead: int = 0
    ends: bool = False
    plain: bool = False

    def make(self, kind: type[Admission] = Admission) -> Admission:
        steps = self.steps if self.ends else None
        return kind(self.groups, self.pace, refill=self.refill, steps=steps, max_uses=self.max_uses)


# A step off, many versions in flight, updates per step, several steps per publication; then groups that are replaced,
# with and without a batch that is taken while another step trains.
SMALL = [
    Small(2, Pace(), 3),
    Small(2, Pace(max_staleness=1), 3),
    Small(1, Pace(max_staleness=3), 5),
    Small(1, Pace(updates_per_step=2, sync_interval=2, max_staleness=3), 4),
    Small(2, Pace(sync_interval=2, max_staleness=1), 4),
    Small(1, Pace(updates_per_step=2, sync_interval=4, max_staleness=6), 4),
    Small(2, Pace(), 2, refill=3),
    Small(2, Pace(max_staleness=1), 3, refill=2),
    Small(1, Pace(max_staleness=2), 4, refill=1),
    Small(1, Pace(updates_per_step=2, sync_interval=4, max_staleness=6), 4, refill=2),
    Small(1, Pace(max_staleness=2), 4, refill=1, ahead=1),
    Small(2, Pace(max_staleness=1), 3, ahead=1, ends=True),
]
# The same with groups that are used again: with a batch taken ahead, up to the end of the run, three times, with
# several updates per step and steps per publication, and with groups that are replaced.
REUSING = [
    Small(2, Pace(max_staleness=1), 4, max_uses=2, ahead=1),
    Small(2, Pace(max_staleness=2), 4, max_uses=2, ends=True),
    Small(3, Pace(max_staleness=2), 4, max_uses=3, ends=True, plain=True),
    Small(2, Pace(updates_per_step=2, sync_interval=2, max_staleness=5), 4, max_uses=2, ends=True),
    Small(2, Pace(sync_interval=2, max_staleness=3), 4, max_uses=2, ahead=1, ends=True),
    Small(2, Pace(max_staleness=1), 3, max_uses=2, refill=1),
]

# With engines that sleep while the trainer works: one step and several per publication, and replaced groups.
IN_TURNS = [
    Small(2, Pace(in_turns=True), 3),
    Small(2, Pace(1, 2, 1, in_turns=True), 4),
    Small(1, Pace(2, 6, 5, in_turns=True), 4, refill=2),
    Small(2, Pace(1, 3, 2, in_turns=True), 5, ends=True),
]


@pytest.mark.parametrize("small", SMALL + REUSING + IN_TURNS, ids=str)
def test_every_state_of_a_small_run_keeps_the_rules(small: Small) -> None:
    """The rules are the bound, the order, the size of a batch, each group once, and that a run reaches its end.

    A group that is used again was trained before, not too often, within the bound, and in no new one's place.
    """
    reuses = small.max_uses > 1
    assert explore(small.make, small.steps, small.ahead, reuses=reuses, plain=small.plain) > small.steps


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        (TOO_MUCH_ROOM, "the bound is passed"),
        (NO_CAP, "a second call starts groups again|the bound is passed"),
        (NO_WAIT, "the bound is passed"),
        (holding(ready=NEWEST_FIRST), "an older group is left|the bound is passed"),
        (NOTHING_NEW, "deadlock"),
        (NO_REFILL, "a replaced group leaves no place to another"),
        (NO_REFILL_LIMIT, "more groups are replaced than the limit allows"),
        (LIMIT_OF_THE_RUN, "a group is queued below the limit"),
        (FORGETS_REPLACED, "a replaced group is not settled"),
        (SETTLES_REPLACED_TWICE, "the counters do not add up"),
        (TRAINS_FAILED, "a failed group counts as trainable"),
        (holding(in_flight=AGE_OF_THE_START), "an older group is left"),
    ],
)
def test_each_rule_is_needed(mutant: type[Admission], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        for small in reversed(SMALL):  # a rule is likelier to be broken in the last ones
            explore(lambda small=small: small.make(mutant), small.steps, small.ahead)


@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        (TAKES_EARLY, "engines work while the trainer does"),
        (PAST_THE_PUBLICATION, "groups start for steps after the next publication"),
        (holding(), "a later group is first"),  # in the order in which they finished
        (NO_WAIT_FOR_ROOM, "engines work while the trainer does|groups start for steps after"),
    ],
)
def test_each_rule_of_turns_is_needed(mutant: type[Admission], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        for small in IN_TURNS:
            explore(lambda small=small: small.make(mutant), small.steps)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "broken"),
    [
        (NO_PLACE_FOR_REUSE, "nothing is ever used again"),
        (CROWDS_OUT, "the bound is passed"),
        (FORGETS_THE_END, "a new group is left at the end|the bound is passed"),
        (ONLY_OLD_GROUPS, "a step has no new group"),
        (FILLS_UP_FAILED, "a step has no new group that can be trained"),
        (REUSES_EARLY, "groups are used again although the trainer has work"),
        (REUSES_TOO_OLD, "rows are kept that no step can use"),
        (REUSES_FILTERED, "a group is used again that was not trained|are not counted"),
        (SETTLES_REUSED, "a group ends twice"),
        (KEEPS_ROWS, "rows are kept that no step can use"),
        (holding(ENDLESS), "rows are kept that no step can use"),
        (holding(MOST_USED_FIRST), "groups that come later are used again first"),
        (holding(YOUNGEST_FIRST), "groups that come later are used again first"),
    ],
)
def test_each_rule_of_bounded_replay_is_needed(mutant: type[Admission], broken: str) -> None:
    with pytest.raises(AssertionError, match=broken):
        for small in REUSING:
            explore(lambda small=small: small.make(mutant), small.steps, small.ahead, reuses=True, plain=small.plain)


class AnyPace(Pace):
    """A pace without the check of its numbers."""

    def __post_init__(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("steps_per_sync", [1, 2])
def test_the_check_at_start_up_refuses_exactly_the_runs_that_wait_forever(updates: int, steps_per_sync: int) -> None:
    interval = updates * steps_per_sync
    refused = 0
    sizes = itertools.product(range(interval + 1), (0, 1), (1, 2), (0, 1))
    for staleness, refill, max_uses, ahead in sizes:
        pace = AnyPace(updates, interval, staleness)
        small = Small(2, pace, steps_per_sync + 1, refill, max_uses)
        if not steps_without_room(pace):
            explore(small.make, small.steps, ahead, plain=True)
        else:
            refused += 1
            with pytest.raises(AssertionError, match="deadlock"):
                explore(small.make, small.steps, ahead, plain=True)
    assert refused == 8 * (interval - 1)


def labels_of_the_first_group(pace: Pace, shift: int, steps: int) -> None:
    """Train `steps` steps, then finish one group whose engine labels its tokens `shift` versions off.

    A group's tokens have every version that was published while it was in flight; the next one is being loaded.
    """
    admission = Admission(2, pace)
    published, started = [0], dict[int, int]()
    admission.set_version(0)
    for step in range(steps):
        started |= dict.fromkeys(admission.admit(), published[-1])
        for group, first in started.items():
            admission.finish(group, True, [version for version in published if version >= first])
        started.clear()
        assert admission.batch(step) is not None
        admission.commit(step, trained=2, filtered=0, dropped_stale=0, failed=0)
        if pace.publishes_after(step + 1):
            published.append((step + 1) * pace.updates_per_step)
            admission.announce(published[-1])
            admission.set_version(published[-1])
    new = admission.admit()
    admission.finish(new[0], True, [published[-1] + shift])


@pytest.mark.parametrize("pace", [small.pace for small in SMALL[:6]], ids=str)
@pytest.mark.parametrize("shift", [-1, 1])
def test_labels_of_another_version_are_found_in_the_first_group(pace: Pace, shift: int) -> None:
    period = pace.sync_interval // pace.updates_per_step
    for steps in (0, period, 2 * period):
        labels_of_the_first_group(pace, 0, steps)
        with pytest.raises(ValueError, match=r"has a token of version|never published"):
            labels_of_the_first_group(pace, shift, steps)


def test_tokens_may_carry_a_version_from_its_announcement_on() -> None:
    """Engines serve a version before the controller hears that all of them do."""
    admission = Admission(1, Pace(max_staleness=2))
    admission.set_version(0)
    admission.admit()
    with pytest.raises(ValueError, match="group 0 has tokens of version 1, which was never published; the last is 0"):
        admission.finish(0, True, [0, 1])
    admission.announce(1)
    admission.finish(0, True, [0, 1])
    with pytest.raises(ValueError, match="group 1 has tokens of version 2, which was never published; the last is 1"):
        admission.finish(1, True, [1, 2])
    assert admission.counters.in_flight == 2  # refused, not lost


def test_replaced_groups_are_filtered_by_the_next_step_and_part_of_the_history() -> None:
    admission = Admission(2, SYNC, refill=3)
    admission.set_version(0)
    assert admission.admit() == [0, 1]
    assert admission.replace(1, [0]) and admission.admit() == [2]
    assert admission.replace(2, [0]) and admission.admit() == [3]
    admission.finish(0, True, [0])
    counters = admission.counters
    assert (counters.in_flight, counters.replaced, counters.ready) == (1, 2, 1) and counters.balanced
    admission.finish(3, True, [0])
    assert admission.batch(0) == ([0, 3], []) and admission.taken(0).replaced == [1, 2]
    assert admission.counters.taken == 4 and admission.counters.replaced == 0
    before = admission.state_dict()
    with pytest.raises(ValueError, match=r"do not account for its 4 groups, 0 of them failed .* 2 were replaced"):
        admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0)
    with pytest.raises(ValueError, match="do not account"):
        admission.commit(0, trained=3, filtered=1, dropped_stale=0, failed=0)
    admission.commit(0, trained=1, filtered=3, dropped_stale=0, failed=0)
    assert (admission.counters.filtered, admission.counters.settled) == (3, 4) and admission.counters.balanced
    for state, next_groups in ((before, [0, 1]), (admission.state_dict(), [4, 5])):
        resumed = Admission(2, SYNC, refill=3)
        resumed.load_state_dict(state)
        resumed.set_version(1)
        assert resumed.admit() == next_groups  # replaced groups that no commit settled are drawn again
        assert resumed.replace(next_groups[0], [1]) and len(resumed.admit()) == 1


@pytest.mark.parametrize(
    ("ended", "message"),
    [
        ({}, None),
        ({"trained": [0]}, r"missing: \[3\]"),
        ({"trained": [0, 9]}, r"not taken: \[9\], missing: \[3\]"),
        ({"trained": [0, 0]}, r"missing: \[3\]"),
        ({"trained": [0, 1], "filtered": [3]}, "replaced: "),
        ({"trained": [0, 2], "failed": [3]}, "failed in rollout: "),
        ({"trained": [0, 3], "dropped_stale": [1], "filtered": []}, "replaced: "),
    ],
)
def test_a_commit_names_exactly_the_groups_that_its_step_has_taken(
    ended: dict[str, list[int]], message: str | None
) -> None:
    """Numbers that add up do not show that the right groups were trained."""
    admission = Admission(3, SYNC, refill=1)
    admission.set_version(0)
    admission.admit()
    assert admission.replace(1, [0]) and admission.admit() == [3]
    for group in (0, 2, 3):
        admission.finish(group, group != 2, [0])
    assert admission.batch(0) == ([0, 3], [2]) and admission.taken(0).replaced == [1]
    whole = {"trained": [0, 3], "filtered": [1], "dropped_stale": [], "failed": [2], **ended}
    numbers = {"trained": 2, "filtered": 1, "dropped_stale": 0, "failed": 1}
    if message is None:
        admission.commit(0, **numbers, ended=whole)
        assert admission.counters.settled == 4
        return
    with pytest.raises(ValueError, match=message):
        admission.commit(0, **numbers, ended=whole)
    assert admission.counters.taken == 4 and admission.counters.settled == 0, "nothing is settled"


def reusing(**options: Any) -> Admission:
    """Steps of two groups; 0 and 1 were trained by step 0, 2 is ready, and 3 is in flight."""
    admission = Admission(2, Pace(max_staleness=3), max_uses=2, **options)
    admission.set_version(0)
    assert admission.admit() == [0, 1, 2, 3]  # eight fit the bound, but not if each is used twice
    for group in (0, 1, 2):
        admission.finish(group, True, [0])
    assert admission.batch(0) == ([0, 1], []) and sorted(admission.taken(0).reused) == []
    admission.commit(0, trained=2, filtered=0, dropped_stale=0, failed=0, trained_groups=[1, 0])
    return admission


def test_a_step_is_filled_up_with_groups_that_were_trained_before() -> None:
    admission = reusing()
    assert admission.counters.reusable == 2 and admission.take_released() == []
    assert admission.batch(1) == ([2], []) and sorted(admission.taken(1).reused) == [0]
    assert admission.unsettled == [2, 3], "a group that is used again has ended"
    ends = {"trained": 1, "filtered": 0, "dropped_stale": 0, "failed": 0}
    with pytest.raises(ValueError, match="step 1 took 1 groups to train them again, not 0"):
        admission.commit(1, **ends, trained_groups=[2])
    with pytest.raises(ValueError, match="do not account for its 1 groups"):
        admission.commit(1, **ends | {"trained": 2}, reused=1, trained_groups=[0, 2])
    with pytest.raises(ValueError, match="step 1: the ids of the trained groups are missing"):
        admission.commit(1, **ends, reused=1)
    for groups in ([0], [], [2, 2]):
        with pytest.raises(ValueError, match=r"cannot be its 1 trained groups; the trainable ones are \[2\]"):
            admission.commit(1, **ends, reused=1, trained_groups=groups)
    assert admission.counters.taken == 1 and admission.counters.reused == 0
    admission.commit(1, **ends, reused=1, trained_groups=[2])
    counters = admission.counters
    assert (counters.trained, counters.reused, counters.reusable) == (3, 1, 2) and counters.balanced
    assert admission.take_released() == [0] and admission.take_released() == []  # used twice


def test_a_resume_uses_no_group_again_that_the_history_has_settled() -> None:
    admission = reusing()
    admission.batch(1)
    admission.commit(1, trained=1, filtered=0, dropped_stale=0, failed=0, reused=1, trained_groups=[2])
    resumed = Admission(2, Pace(max_staleness=3), max_uses=2)
    resumed.load_state_dict(admission.state_dict())
    assert (resumed.counters.reused, resumed.counters.reusable) == (1, 0)
    resumed.set_version(2)
    assert resumed.admit() == [3, 4, 5, 6]
    resumed.finish(3, True, [2])
    assert resumed.batch(2) is None
    old = {key: value for key, value in admission.state_dict().items() if key != "reused"}
    resumed.load_state_dict(old)  # of a checkpoint of before
    assert resumed.counters.reused == 0


@pytest.mark.parametrize(
    ("max_uses", "places", "seconds", "least", "most"),
    [
        (1, 16, 4.0, 1.9, 2.3),  # the engines make a step's groups in two seconds
        (2, 16, 4.0, 1.0, 1.35),
        (3, 16, 4.0, 1.0, 1.15),
        (2, 16, 1.5, 1.0, 1.05),
    ],
)
def test_the_trainer_does_not_wait_for_generation_as_long_as_groups_can_be_used_again(
    max_uses: int, places: int, seconds: float, least: float, most: float
) -> None:
    """Seconds per step of a trainer that needs one, with `places` for groups that take `seconds` to generate."""
    ran = run_timeline(Admission(8, Pace(max_staleness=7), max_uses=max_uses, steps=100), places, seconds)
    assert least <= ran.seconds / 100 <= most
    # Nothing is used again if the engines keep up.
    assert ran.reused == 0 if max_uses == 1 else (ran.reused > 100) is (seconds > 2)


@given(
    groups=st.integers(1, 3), steps=st.integers(1, 9), ahead=st.integers(0, 6), refill=st.integers(0, 4), data=st.data()
)
def test_no_group_is_started_for_a_step_after_the_last(
    groups: int, steps: int, ahead: int, refill: int, data: st.DataObject
) -> None:
    """And every step of the run still gets its groups, whatever the order in which they finish."""
    admission = Admission(groups, Pace(1, 1, ahead), refill=refill, steps=steps)
    for step in range(steps):
        admission.set_version(step)
        while (taken := admission.batch(step)) is None:
            admission.admit()
            group = data.draw(st.sampled_from(sorted(admission.in_flight)))
            if not (data.draw(st.booleans()) and admission.replace(group, [step])):
                admission.finish(group, True, [step])
        replaced = len(admission.taken(step).replaced)
        admission.commit(step, trained=len(taken[0]), filtered=replaced, dropped_stale=0, failed=0)
        assert admission.admit() == [] or step + 1 < steps
    counters = admission.counters
    assert counters.trained == groups * steps and counters.admitted == counters.trained + counters.filtered
    assert not admission.in_flight and admission.room == 0


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


def test_versions_that_start_nothing_leave_nothing_behind() -> None:
    admission, held = Admission(1, SYNC, steps=1), []
    admission.set_version(0)
    admission.admit()
    admission.finish(0, True, [0])
    admission.batch(0)
    admission.commit(0, trained=1, filtered=0, dropped_stale=0, failed=0)
    for version in range(1, 300):
        admission.set_version(version)
        assert admission.admit() == []
        held.append(held_bytes(vars(admission)))
    assert held[-1] == held[100]
