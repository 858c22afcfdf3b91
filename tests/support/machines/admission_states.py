"""Every state that an `Admission` can reach in the first steps of a run, with the bound checked by its definition."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission import Admission

Key = tuple[object, ...]


def steps_without_room(pace: Pace) -> list[int]:
    """Return the steps from one publication to the next that no group could be started for; none is right.

    One such period stands for all: the bound and the versions grow alike from each to the next.
    """
    period = pace.sync_interval // pace.updates_per_step
    return [step for step in range(period) if pace.steps_within_bound(0) <= step]


Use = tuple[int, int]  # the steps that have trained a group, and the version of its oldest token


@dataclass
class Training:
    """A step that is taken and not committed.

    `groups`: version of the oldest token by new group; `settling`: the groups that were replaced before it; `reused`:
    the uses so far of the groups that it trains again; `failed`: those of `groups` that cannot be trained.
    """

    groups: dict[int, int]
    settling: list[int]
    reused: dict[int, Use]
    failed: frozenset[int] = frozenset()

    @property
    def key(self) -> Key:
        trained = sorted(oldest for group, oldest in self.groups.items() if group not in self.failed)
        return len(self.groups), tuple(trained), tuple(sorted(self.reused.values()))


@dataclass
class Trial:
    """An admission with a trainer that publishes as its pace says, and engines that finish groups in any order.

    `running`: version at its start by group in flight; `oldest`: version of the oldest token by queued group; `failed`:
    the queued groups that cannot be trained; `replaced`: groups without signal since the last step; `training`: the
    steps that are taken, at most `ahead` + 1; `ended`: groups of the steps that are trained; `held`: those of them
    whose rows are still in the queue.
    """

    admission: Admission
    ahead: int = 0
    published: int = 0
    step: int = 0  # the number of steps that are trained
    running: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)
    replaced: list[int] = field(default_factory=list)
    training: list[Training] = field(default_factory=list)
    failed: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()
    held: dict[int, Use] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """The basis of the future: groups of one version are alike, queued ones but for their order."""
        reusing = self.admission.max_uses > 1
        training = tuple(each.key for each in self.training) if reusing else len(self.training)
        by_age = sorted(self.oldest.items(), key=lambda item: item[1])  # those of one age in order of completion
        queued = tuple((oldest, group in self.failed) for group, oldest in by_age)
        finished = queued, len(self.replaced), training, tuple(sorted(self.held.values()))
        return self.step, self.published, tuple(sorted(self.running.values())), *finished

    def last_update(self, step: int) -> int:
        updates = self.admission.pace.updates_per_step
        return (step + 1) * updates - 1

    def can_use(self, group: int) -> bool:
        """Tell by definition whether the next step may train a group again."""
        admission, step = self.admission, self.step + len(self.training)
        uses, oldest = self.held[group]
        in_time = self.last_update(step) - oldest <= admission.pace.max_staleness
        return uses < admission.max_uses and in_time and (admission.steps is None or step < admission.steps)

    def release(self) -> None:
        """Forget the rows that admission releases."""
        released = self.admission.take_released()
        useful = [group for group in released if group in self.held and self.can_use(group)]
        assert not useful, "rows that could be used again leave the queue"
        self.held = {group: use for group, use in self.held.items() if group not in released}
        assert all(map(self.can_use, self.held)), "rows are kept that no step can use"

    def admit(self) -> None:
        groups = self.admission.admit()
        taken = [group for each in self.training for group in (*each.groups, *each.settling)]
        known = self.ended.union(self.running, self.oldest, self.replaced, taken)
        assert not known & set(groups), "a group is started twice"
        self.running |= dict.fromkeys(groups, self.published)
        assert self.admission.admit() == [], "a second call starts groups again"
        self.release()

    def finish(self, group: int, *, ok: bool = True, newer: bool = False) -> None:
        """Finish a group. `newer`: its first token was sampled after its start, with the weights that are served."""
        started = self.running.pop(group)
        self.oldest[group] = self.published if newer else started
        self.failed |= set() if ok else {group}
        self.admission.finish(group, ok, [self.oldest[group]])

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
        step = self.step + len(self.training)
        taken = self.admission.batch(step)
        if taken is None:
            return False
        groups, failed = sorted(taken[0] + taken[1]), frozenset(taken[1])
        if self.admission.pace.in_turns:
            assert not self.running, "engines work while the trainer does"
            later = self.oldest.keys() - set(groups)
            assert max(groups) < min(later, default=max(groups) + 1), "a later group is first"
        assert failed == self.failed.intersection(groups), "a failed group counts as trainable, or the other way round"
        bound = self.admission.pace.max_staleness
        reused = self.take_again(step, len(taken[0]))
        assert len(groups) + len(reused) == self.admission.groups, "the step has not its number of groups"
        assert self.admission.taken(step).replaced == sorted(self.replaced), "a replaced group is not settled"
        ages = {group: self.oldest.pop(group) for group in groups}
        assert all(self.last_update(step) - oldest <= bound for oldest in ages.values()), "the bound is passed"
        assert max(ages.values()) <= min(self.oldest.values(), default=max(ages.values())), "an older group is left"
        assert not reused or not self.oldest, "a new group is left for one that is used again"
        self.training.append(Training(ages, self.replaced, reused, failed))
        self.failed -= failed
        self.replaced = []
        self.release()
        return True

    def take_again(self, step: int, new: int) -> dict[int, Use]:
        """Remove the groups that a step uses again from those that are held, and return them."""
        groups = sorted(self.admission.taken(step).reused)
        if not groups:
            return {}
        assert new, "a step has no new group that can be trained"
        assert not self.training, "groups are used again although the trainer has work"
        assert self.held.keys() >= set(groups), "a group is used again that was not trained, or has left the queue"
        assert all(self.held[group][0] < self.admission.max_uses for group in groups), "a group is used too often"
        assert all(map(self.can_use, groups)), "the bound is passed by a group that is used again"
        order = sorted(self.held, key=lambda group: (*self.held[group], group))
        assert sorted(order[: len(groups)]) == groups, "groups that come later are used again first"
        return {group: self.held.pop(group) for group in groups}

    def commit(self, trained: int | None = None, *, early: bool = False) -> None:
        """Commit the oldest step that is taken, and publish if it is time, or `early`.

        `trained`: how many groups had signal.
        """
        training = self.training.pop(0)
        usable = [group for group in training.groups if group not in training.failed]
        groups, failed = usable[:trained], len(training.failed)
        filtered = len(usable) - len(groups) + len(training.settling)
        before = self.admission.counters.reused
        self.admission.commit(
            self.step, trained=len(groups), filtered=filtered, dropped_stale=0, failed=failed,
            reused=len(training.reused), trained_groups=groups,
        )  # fmt: skip
        self.ended = self.ended.union(training.groups, training.settling)
        assert self.admission.counters.settled == len(self.ended), "a group ends twice"
        assert self.admission.counters.reused == before + len(training.reused), "a further use is not counted"
        self.step += 1
        self.held |= {group: (1, training.groups[group]) for group in groups}
        self.held |= {group: (uses + 1, oldest) for group, (uses, oldest) in training.reused.items()}
        self.release()
        pace, due = self.admission.pace, self.admission.pace.publishes_after(self.step)
        if due or early:
            self.published = self.step * pace.updates_per_step
            self.admission.set_version(self.published)
        if pace.in_turns:
            assert due or not self.admission.room, "groups start for steps after the next publication"
            assert not due or not self.running | self.oldest, "groups are left that the version before has sampled"

    def check_the_end(self) -> None:
        """Nothing is left after the last step, if admission knows that it is the last one."""
        if self.admission.steps == self.step:
            assert not self.running and not self.oldest, "a new group is left at the end"
            assert not self.held, "rows are left at the end"


def successors(trial: Trial, steps: int, *, plain: bool = False) -> Iterator[Trial]:
    """Yield every state that one action leads to. Raises AssertionError if an action breaks a rule.

    `plain`: no group fails, and the first token of each has the version of its start.
    """

    def after(action: Callable[[Trial], object]) -> Trial | None:
        copied = copy.deepcopy(trial)
        return copied if action(copied) is not False else None

    actions: list[Callable[[Trial], object]] = [Trial.admit] if trial.admission.room else []
    for group in {version: group for group, version in trial.running.items()}.values():  # one of each version
        actions.append(partial(Trial.finish, group=group))
        if not plain:
            actions.append(partial(Trial.finish, group=group, ok=False))
        if not plain and trial.running[group] < trial.published:
            actions.append(partial(Trial.finish, group=group, newer=True))
        if trial.admission.refill:
            actions.append(partial(Trial.finish_without_signal, group=group))
    if len(trial.training) <= trial.ahead and trial.step + len(trial.training) < steps:
        actions.append(Trial.take)
    if trial.training:
        actions.append(Trial.commit)
        if trial.admission.pace.in_turns:
            actions.append(partial(Trial.commit, early=True))
        if trial.admission.max_uses > 1:
            actions.append(lambda copied: copied.commit(trained=0))
    found = [state for action in actions if (state := after(action)) is not None]
    assert found or trial.step == steps, "deadlock: nothing can start, finish, be taken or be trained"
    for state in found:
        assert state.admission.counters.balanced, "the counters do not add up"
        assert state.admission.counters.reusable == len(state.held), "the groups that may be used again are not counted"
    yield from found


def explore(
    make: Callable[[], Admission], steps: int, ahead: int = 0, *, reuses: bool = False, plain: bool = False
) -> int:
    """Visit every state up to `steps` trained steps; return their number.

    `ahead`: the steps that are taken before the one that trains is committed. `plain`: see `successors`. Raises
    AssertionError if a rule is broken, if the last step cannot be reached from some state, or with `reuses` if no group
    is ever used again.
    """
    admission = make()
    admission.set_version(0)
    start = Trial(admission, ahead)
    before: dict[Key, set[Key]] = {start.key: set()}  # state -> the states that lead to it
    waiting, last, reused = [start], set(), 0
    while waiting:
        trial = waiting.pop()
        reused += sum(len(each.reused) for each in trial.training)
        if trial.step == steps:
            trial.check_the_end()
            last.add(trial.key)
        for state in successors(trial, steps, plain=plain):
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
    assert reused or not reuses, "nothing is ever used again"
    return len(before)
