"""Every state that an `Admission` can reach in the first steps of a run, with the bound checked by its definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from megarl.config.pace import Pace
from megarl.rollout.admission import Admission


@dataclass
class Trial:
    """An admission with a trainer that publishes as its pace says, and engines that finish groups in any order.

    `running`: version at its start by group in flight; `oldest`: version of the oldest token by finished group.
    """

    admission: Admission
    updates: int = 0
    published: int = 0
    step: int = 0
    running: dict[int, int] = field(default_factory=dict)
    oldest: dict[int, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[object, ...]:
        """What the future depends on, if finished groups are told apart by version and order only."""
        return self.step, self.published, tuple(sorted(self.running.items())), tuple(self.oldest.items())

    def admit(self) -> None:
        groups = self.admission.admit()
        self.running |= dict.fromkeys(groups, self.published)
        assert self.admission.admit() == [], "a second call starts groups again"

    def finish(self, group: int) -> None:
        self.oldest[group] = self.running.pop(group)
        self.admission.finish(group, True, self.oldest[group])

    def train(self) -> bool:
        """Take and commit the next step; False if its groups are not ready."""
        taken = self.admission.batch(self.step)
        if taken is None:
            return False
        groups, _ = taken
        pace = self.admission.pace
        assert len(groups) == self.admission.groups, "the step has not its number of groups"
        ages = {group: self.oldest.pop(group) for group in groups}
        last_update = self.updates + pace.updates_per_step - 1
        assert all(last_update - oldest <= pace.max_staleness for oldest in ages.values()), "the bound is passed"
        assert max(ages.values()) <= min(self.oldest.values(), default=max(ages.values())), "an older group is left"
        self.admission.commit(self.step, trained=len(groups), filtered=0, dropped_stale=0, failed=0)
        self.step += 1
        self.updates += pace.updates_per_step
        if pace.publishes_after(self.step):
            self.published = self.updates
            self.admission.set_version(self.published)
        return True


def successors(trial: Trial, steps: int) -> Iterator[Trial]:
    """Yield every state that one action leads to. Raises AssertionError if an action breaks a rule."""

    def after(action: Callable[[Trial], object]) -> Trial | None:
        copied = copy.deepcopy(trial)
        return copied if action(copied) is not False else None

    actions: list[Callable[[Trial], object]] = [Trial.admit] if trial.admission.room else []
    actions += [lambda copied, group=group: copied.finish(group) for group in trial.running]
    if trial.step < steps:
        actions.append(Trial.train)
    found = [state for action in actions if (state := after(action)) is not None]
    assert found or trial.step == steps, "deadlock: nothing can start, finish or train"
    yield from found


def explore(kind: Callable[[int, Pace], Admission], groups: int, pace: Pace, steps: int) -> int:
    """Visit every state up to `steps` trained steps; return their number. AssertionError if a rule is broken."""
    admission = kind(groups, pace)
    admission.set_version(0)
    start = Trial(admission)
    seen, waiting = {start.key}, [start]
    while waiting:
        for state in successors(waiting.pop(), steps):
            if state.key not in seen:
                seen.add(state.key)
                waiting.append(state)
    return len(seen)
