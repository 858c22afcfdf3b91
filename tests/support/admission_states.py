"""Every state that an `Admission` can reach in the first steps of a run, with the bound checked by its definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megarl.config.pace import Pace
from megarl.rollout.admission import Admission

Key = tuple[object, ...]


def steps_without_room(pace: Pace) -> list[int]:
    """Return the steps from one publication to the next that no group could be started for; none is right.

    One such period stands for all: the bound and the versions grow alike from each to the next.
    """
    period = pace.sync_interval // pace.updates_per_step
    return [step for step in range(period) if pace.steps_within_bound(0) <= step]


@dataclass
class Trial:
    """An admission with a trainer that publishes as its pace says, and engines that finish groups in any order.

    `running`: version at its start by group in flight; `oldest`: version of the oldest token by queued group;
    `replaced`: groups without signal since the last step; `training`, `settling`: the groups of the step that is being
    trained, and those replaced before it; `ended`: groups of the steps that are trained.
    """

    admission: Admission
    updates: int = 0
    published: int = 0
    step: int = 0
    running: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)
    training: list[int] = field(default_factory=list)
    settling: list[int] = field(default_factory=list)
    ended: frozenset[int] = frozenset()

    @property
    def key(self) -> Key:
        """The basis of the future: groups in flight of one version are alike, queued ones but for their order."""
        finished = tuple(self.oldest.values()), len(self.replaced), bool(self.training)
        return self.step, self.published, tuple(sorted(self.running.values())), *finished

    def admit(self) -> None:
        groups = self.admission.admit()
        known = self.ended.union(self.running, self.oldest, self.replaced, self.training, self.settling)
        assert not known & set(groups), "a group is started twice"
        self.running |= dict.fromkeys(groups, self.published)
        assert self.admission.admit() == [], "a second call starts groups again"
        held, capacity = len(self.running) + len(self.oldest) + len(self.training), self.admission.capacity
        assert capacity is None or held <= capacity, "the queue holds more than it may"

    def finish(self, group: int) -> None:
        self.oldest[group] = self.running.pop(group)
        self.admission.finish(group, True, [self.oldest[group]])

    def finish_without_signal(self, group: int) -> None:
        """The group is replaced at once or, if the limit is reached, queued."""
        room = self.admission.room
        if not self.admission.replace(group, [self.running[group]]):
            assert len(self.replaced) == self.admission.refill, "a group is queued below the limit"
            return self.finish(group)
        del self.running[group]
        self.replaced.append(group)
        assert len(self.replaced) <= self.admission.refill, "more groups are replaced than the limit allows"
        assert self.admission.room == room + 1, "a replaced group leaves no place to another"
        return None

    def take(self) -> bool:
        """Take the next step; False if its groups are not ready."""
        taken = self.admission.batch(self.step)
        if taken is None:
            return False
        groups, _ = taken
        pace = self.admission.pace
        assert len(groups) == self.admission.groups, "the step has not its number of groups"
        assert self.admission.replaced(self.step) == sorted(self.replaced), "a replaced group is not settled"
        ages = {group: self.oldest.pop(group) for group in groups}
        last_update = self.updates + pace.updates_per_step - 1
        assert all(last_update - oldest <= pace.max_staleness for oldest in ages.values()), "the bound is passed"
        assert max(ages.values()) <= min(self.oldest.values(), default=max(ages.values())), "an older group is left"
        self.training, self.settling, self.replaced = groups, self.replaced, []
        return True

    def commit(self) -> None:
        """Train and commit the step that is taken, and publish if it is time."""
        trained, filtered = len(self.training), len(self.settling)
        self.admission.commit(self.step, trained=trained, filtered=filtered, dropped_stale=0, failed=0)
        self.ended = self.ended.union(self.training, self.settling)
        self.training, self.settling = [], []
        self.step += 1
        self.updates += self.admission.pace.updates_per_step
        if self.admission.pace.publishes_after(self.step):
            self.published = self.updates
            self.admission.set_version(self.published)


def successors(trial: Trial, steps: int) -> Iterator[Trial]:
    """Yield every state that one action leads to. Raises AssertionError if an action breaks a rule."""

    def after(action: Callable[[Trial], object]) -> Trial | None:
        copied = copy.deepcopy(trial)
        return copied if action(copied) is not False else None

    actions: list[Callable[[Trial], object]] = [Trial.admit] if trial.admission.room else []
    for group in {version: group for group, version in trial.running.items()}.values():  # one of each version
        actions.append(lambda copied, group=group: copied.finish(group))
        if trial.admission.refill:
            actions.append(lambda copied, group=group: copied.finish_without_signal(group))
    if trial.step < steps:
        actions.append(Trial.commit if trial.training else Trial.take)
    found = [state for action in actions if (state := after(action)) is not None]
    assert found or trial.step == steps, "deadlock: nothing can start, finish, be taken or be trained"
    for state in found:
        assert state.admission.counters.balanced, "the counters do not add up"
    yield from found


def explore(make: Callable[[], Admission], steps: int) -> int:
    """Visit every state up to `steps` trained steps; return their number.

    Raises AssertionError if a rule is broken, or if the last step cannot be reached from some state.
    """
    admission = make()
    admission.set_version(0)
    start = Trial(admission)
    before: dict[Key, set[Key]] = {start.key: set()}  # state -> the states that lead to it
    waiting, last = [start], set()
    while waiting:
        trial = waiting.pop()
        if trial.step == steps:
            last.add(trial.key)
        for state in successors(trial, steps):
            if state.key not in before:
                before[state.key] = set()
                waiting.append(state)
            before[state.key].add(trial.key)
    reaching, found = set(last), list(last)
    while found:
        new = before[found.pop()] - reaching
        reaching |= new
        found += new
    assert reaching == before.keys(), "the run cannot end from some state"
    return len(before)
