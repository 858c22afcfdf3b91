"""Admission of prompt groups and the exact count of how each of them ends. Pure: no clock, no tasks, no processes.

Invariant: every admitted group ends as exactly one of trained, filtered, dropped_stale, failed, and at every moment the
`Counters` are balanced.

A group belongs to no step until a step takes it. The bound on staleness gives each group a last step that may train
it. It follows from the version of the group's oldest token or, in flight, from the version at which it started. Two
rules keep the bound:

- At a version, only as many groups start as the steps up to their last step can still take.
- A step takes the oldest finished groups. It waits for older groups in flight if it would otherwise leave more of them
  than the steps up to their last step can take (`awaited`).

After a resume, unfinished groups start again with their tokens (`keep`). Their start version is the one that these
tokens count as, so both rules hold for them too.

In synchronous training, step t gets exactly the groups [t * groups, (t + 1) * groups). A `failed` group counts towards
its step and is not redrawn.

If engines and trainer take turns (`Pace.in_turns`), engines finish everything that their version allows before a step
is taken. Nothing starts for steps after the next publication. No group is in flight while the trainer works, and each
step takes its groups in the order of their ids.

Dynamic sampling (DAPO, arXiv:2503.14476 section 3.2): a finished group whose rewards are all equal is replaced instead
of queued. The next group takes its place, and the next step settles it as filtered. At most `refill` groups are
replaced between two steps, so that every step ends.

Bounded replay: with `max_uses` k > 1, up to k steps may train a group, within the bound. A step reuses groups only to
fill up: the trainer has nothing else to do (`needed`), and some new group has finished without failing, but too few
have. Two rules keep reused groups from displacing new ones:

- No more groups start than the steps up to their last step could train k times each, but always enough for one step.
  Otherwise groups in flight would fill the bound, and none would be reused.
- The new groups that a step leaves must fit the steps up to their last step, as without replay (`awaited`).

Replay settles nothing: a group ends once, at its first use. Further uses are counted separately.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any

from megarl.config.derived.staleness import Pace
from megarl.rollout.admission.admission_log import Event, held_steps
from megarl.rollout.admission.counters import Counters, StepGroups, check_ends, check_numbers, check_uses
from megarl.rollout.admission.groups_in_flight import GroupsInFlight, ReadyGroups, ReplayUse, ReusableGroups


class Admission:
    """The state machine that decides which prompt groups may start, and counts how they end.

    `groups`: groups per step (>= 1). `pace`: the bound on staleness; versions count optimizer updates. `refill`: how
    many groups without signal may be replaced between two steps; 0 turns dynamic sampling off. `steps`: the run's last
    step plus one; None: no end. `max_uses`: how many steps may train a group (>= 1). `record` is called with every
    change, as JSON content (`admission_log.py`).
    """

    def __init__(
        self, groups: int, pace: Pace, *, refill: int = 0, steps: int | None = None,
        max_uses: int = 1, record: Callable[[Event], object] = lambda event: None,
    ) -> None:  # fmt: skip
        if groups < 1:
            raise ValueError(f"admission needs groups >= 1, got {groups}")
        self.groups = groups
        self.pace = pace
        self.refill = refill
        self.steps = steps
        self.version = -1
        self._next_group = 0
        self._redraw: list[int] = []  # rolled back; admitted again before any new group
        self._in_flight = GroupsInFlight()
        self._ready = ReadyGroups(by_id=pace.in_turns)
        self._replaced: list[int] = []  # since the last step was taken
        self._taken: dict[int, StepGroups] = {}  # by step, if it is not committed
        self._reusable = ReusableGroups(max_uses)  # all of them can be used by the next step
        self._released: list[int] = []  # groups whose rows are no longer needed, since `take_released`
        self._done: dict[str, int] = {"trained": 0, "filtered": 0, "dropped_stale": 0, "failed": 0}
        self._reused = 0  # uses of groups after their first one, in committed steps
        self._committed_steps: int = 0
        self._attempts = 0  # groups ever started, including those that a resume discarded
        # The bound counts from here: (version, steps done) when this history's first version was set.
        self._base: tuple[int, int] | None = None
        self._held: set[int] = set()  # steps of an earlier controller; their rows are not in the queue
        self._record = record

    def _if_reusing(self, **values: object) -> Event:
        """Return event fields that only runs with replay have."""
        return values if self.max_uses > 1 else {}

    def announce(self, version: int) -> None:
        """Record that engines are about to serve `version`, so that tokens may carry it."""
        self._in_flight.announce(version)
        self._record({"event": "announce", "version": version})

    def set_version(self, version: int) -> None:
        """Record that the engines serve `version`. Raises ValueError if it is lower than the last one."""
        if version < self.version:
            raise ValueError(f"weight version went back from {self.version} to {version}")
        self.version = version
        self._in_flight.serve(version)
        if self._base is None:
            self._base = (version, self._steps_taken)
        self._record({"event": "set_version", "version": version})

    @property
    def _steps_taken(self) -> int:
        """The number of steps that have taken their groups."""
        return self._committed_steps + len(self._taken)

    def steps_within_bound(self, version: int) -> int:
        """Return the number of steps, from the start of the history, that may train tokens of `version`."""
        if self._base is None:
            return 0
        first, steps = self._base
        return steps + self.pace.steps_within_bound(version - first)

    def _end(self, version: int) -> int:
        """Return the same number, limited to the steps up to the next publication or the run's end."""
        end = self.steps_within_bound(version)
        if self.pace.in_turns and self._base is not None:
            first, steps = self._base
            end = min(end, self.pace.next_publication(steps + (version - first) // self.pace.updates_per_step))
        return end if self.steps is None else min(end, self.steps)

    def _usable(self, version: int) -> bool:
        """Return whether the next step may train tokens of `version`."""
        return self._steps_taken < self._end(version)

    @property
    def max_uses(self) -> int:
        """The most steps that may train a group."""
        return self._reusable.max_uses

    @property
    def _waiting_count(self) -> int:
        """The number of new groups that no step has taken."""
        return len(self._in_flight) + len(self._ready)

    @property
    def room(self) -> int:
        """The number of groups that may start now; see the two rules in the module's docstring."""
        room = self._room_at(self.version)
        if self.max_uses > 1:
            used_fully = self._places(self.version) // self.max_uses
            room = min(room, max(self.groups, used_fully) - self._waiting_count)
        return max(0, room)

    def _places(self, version: int) -> int:
        """The number of groups that the steps up to the last one of `version` can still take."""
        return (self._end(version) - self._steps_taken) * self.groups

    def _room_at(self, version: int) -> int:
        """The room for groups of `version`, if no group in flight or in the queue has a later version."""
        return max(0, self._places(version) - self._waiting_count)

    @property
    def next_group(self) -> int:
        """The id of the next new group; groups that are started again keep theirs."""
        return self._next_group

    @property
    def attempts(self) -> int:
        """The number of groups ever started: `admitted + rolled_back`."""
        return self._attempts

    def admit(self) -> list[int]:
        """Return the ids of the groups that may start now, and count them as in flight."""
        room = self.room
        redrawn, self._redraw = self._redraw[:room], self._redraw[room:]
        fresh = list(range(self._next_group, self._next_group + room - len(redrawn)))
        self._next_group += len(fresh)
        self._attempts += len(redrawn) + len(fresh)
        self._in_flight.start(redrawn + fresh, self.version)
        if room:
            self._record({"event": "admit", "groups": redrawn + fresh})
        return redrawn + fresh

    def keep(self, kept: Mapping[int, Set[int]]) -> list[int]:
        """Restart groups that have tokens from before a resume, oldest first, as far as the bound allows; return them.

        `kept`: the versions that each group's tokens count as, by group; equally old groups start in this order.
        Groups that ended in the history are left out. A kept group is no new attempt. Raises ValueError before the
        first version is set, after the first group has started, and for a version that is not yet set.
        """
        if self._base is None or self._in_flight or self._ready or self._taken.keys() - self._held:
            raise ValueError("groups are kept after the first version is set and before any group starts")
        oldest = {group: min(versions) for group, versions in kept.items() if versions}
        if late := [group for group, version in oldest.items() if version > self.version]:
            raise ValueError(f"group {late[0]} has only tokens after version {self.version}, at which the run resumes")
        open_again = set(self._redraw)
        for group in sorted(oldest, key=oldest.__getitem__):
            unsettled = group in open_again or group >= self._next_group
            if unsettled and self._room_at(oldest[group]):
                self._in_flight.start_again(group, kept[group])
        self._leave_redraw(set(self._in_flight))
        found, started = [[group, sorted(versions)] for group, versions in kept.items()], list(self._in_flight)
        self._record({"event": "keep", "kept": found, "started": started})
        return started

    def hold(self, base: tuple[int, int], held: Mapping[int, StepGroups]) -> None:
        """Continue with `held`, the uncommitted steps that the trainer took from an earlier controller.

        `base`: the first version set in this history, and the number of steps done by then. Later steps do not use the
        groups of held steps. Raises ValueError after a version is set or a group has started, and for steps or groups
        that cannot follow the history.
        """
        if self._base is not None or self._in_flight or self._taken:
            raise ValueError("steps are held before the first version is set and before any group starts")
        groups = [group for taken in held.values() for group in (*taken.ok, *taken.failed, *taken.replaced)]
        settled = [group for group in groups if group < self._next_group and group not in self._redraw]
        if settled or len(set(groups)) != len(groups):
            raise ValueError(f"groups of the steps {sorted(held)} are settled or in two of them: {sorted(groups)}")
        if sorted(held) != list(range(self._committed_steps, self._committed_steps + len(held))):
            raise ValueError(f"steps {sorted(held)} are held after {self._committed_steps} committed ones")
        self._taken, self._held, self._base = dict(sorted(held.items())), set(held), base
        self._leave_redraw(set(groups))
        self._record({"event": "hold", "base": list(base), "taken": held_steps(held)})

    def _leave_redraw(self, groups: Set[int]) -> None:
        """Count `groups` as admitted; admit skipped groups with lower ids next."""
        end = max(self._next_group, 1 + max(groups, default=-1))
        self._redraw += range(self._next_group, end)
        self._redraw = [group for group in self._redraw if group not in groups]
        self._next_group = end
        self._attempts = max(self._attempts, end - len(self._redraw))

    def finish(self, group: int, ok: bool, versions: Iterable[int] = ()) -> None:
        """Record that `group` was sampled, scored and queued. `ok` is False if it cannot be trained on.

        `versions`: the versions of its tokens. Raises ValueError if the group is not in flight, or if a token has an
        impossible version.
        """
        present = sorted(set(versions))
        self._ready.add(group, ok, self._in_flight.leave(group, present))
        self._record({"event": "finish", "group": group, "ok": ok, "versions": present})

    def replace(self, group: int, versions: Iterable[int]) -> bool:
        """Record that `group` finished without signal, and give its place to another group. Raises as `finish` does.

        At the limit, record nothing and return False: the group must be queued.
        """
        if len(self._replaced) >= self.refill:
            return False
        present = sorted(set(versions))
        self._in_flight.leave(group, present)
        self._replaced.append(group)
        self._record({"event": "replace", "group": group, "versions": present})
        return True

    def batch(self, step: int, *, needed: bool = True) -> tuple[list[int], list[int]] | None:
        """Take the new groups of `step`: (trainable, failed), each sorted; None while they are not ready.

        They are ready when enough groups are finished, or reused groups can fill the step, and `awaited` is empty. In
        turns, no group may be in flight or start either. Without `needed` the trainer has other work, and no groups
        are reused. A second call for the same step returns the same groups. Raises ValueError for a step out of order.
        """
        if step in self._taken:
            return self._taken[step].ok, self._taken[step].failed
        if step != self._steps_taken:
            raise ValueError(f"batches are taken in order: step {step} was requested, but {self._steps_taken} is next")
        if self.pace.in_turns and (self._in_flight or self.room):
            return None
        missing = max(0, self.groups - len(self._ready))
        if (missing and not (needed and self._fills_up(missing))) or self.awaited(step):
            return None
        chosen, oldest = self._ready.take(self.groups)
        ok, failed = sorted(g for g in chosen if chosen[g]), sorted(g for g in chosen if not chosen[g])
        reused = self._reusable.take(missing)
        self._taken[step] = StepGroups(ok, failed, sorted(self._replaced), oldest, reused)
        self._replaced = []
        self._released += self._reusable.drop(self._usable)
        event = {"event": "batch", "step": step, "ok": ok, "failed": failed, "replaced": self._taken[step].replaced}
        self._record(event | self._if_reusing(reused=sorted(reused)))
        return ok, failed

    def _fills_up(self, missing: int) -> bool:
        """Return whether the next step fills up with `missing` reusable groups.

        It needs a new group that did not fail. While another step is uncommitted, the trainer has work and more new
        groups may finish.
        """
        return not self._taken and self._ready.any_ok and len(self._reusable) >= missing

    def take_released(self) -> list[int]:
        """Return, sorted, the groups whose rows no step needs any longer; each queued group is returned once."""
        released, self._released = sorted(self._released), []
        return released

    def taken(self, step: int) -> StepGroups:
        """Return what `step` has taken; its commit settles the replaced groups as filtered.

        Raises KeyError if the step was not taken, or is committed.
        """
        return self._taken[step]

    def awaited(self, step: int) -> list[int]:
        """Return, sorted, the groups in flight of which `step` must await at least one; empty if it need not wait.

        Otherwise more groups of some version and older would be left than the later steps of that version can take.
        """
        left = self._in_flight.by_start + self._ready.left_after(self.groups)
        older = 0
        for version in sorted(left):
            older += left[version]
            if older > (self._end(version) - step - 1) * self.groups:
                return self._in_flight.started_by(version)
        return []

    def commit(
        self, step: int, *, trained: int, filtered: int, dropped_stale: int, failed: int,
        reused: int = 0, trained_groups: Iterable[int] | None = None, ended: Mapping[str, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        """Settle every new group of `step`. Raises ValueError unless the numbers account for each of them once.

        `failed` includes the groups that `batch` reported as failed, `filtered` the replaced ones. `reused`: how many
        groups were trained again; this settles none. `trained_groups`: the new groups that were trained and may be
        reused; required with replay. `ended`: the ids of all new groups of the step, by the name of their number;
        None: not compared.
        """
        if step not in self._taken:
            raise ValueError(f"step {step} was never taken, or is already committed")
        numbers = {"trained": trained, "filtered": filtered, "dropped_stale": dropped_stale, "failed": failed}
        taken = self._taken[step]
        check_numbers(step, taken, numbers)
        groups = None if trained_groups is None else sorted(trained_groups)
        ids = check_uses(step, taken, trained, reused, groups, may_reuse=self.max_uses > 1)
        if ended is not None:
            check_ends(step, taken, numbers, ended)
        uses = self._uses_after(step, ids)
        del self._taken[step]
        self._committed_steps += 1
        for name, number in numbers.items():
            self._done[name] += number
        self._reused += reused
        self._held.discard(step)
        kept = {group for group, use in uses.items() if self._reusable.keep(group, use)}
        self._released += {*taken.ok, *taken.failed, *taken.reused} - kept
        self._released += self._reusable.drop(self._usable)
        again = self._if_reusing(reused=reused, trained_groups=groups)
        self._record({"event": "commit", "step": step, **numbers, **again})

    def _uses_after(self, step: int, trained: Iterable[int]) -> dict[int, ReplayUse]:
        """Return the groups that `step` trained (`trained`: for the first time) and their uses; empty for held rows."""
        if step in self._held:
            return {}
        taken = self._taken[step]
        uses = {group: ReplayUse(taken.oldest[group]) for group in trained}
        return uses | {group: use.again for group, use in taken.reused.items()}

    @property
    def counters(self) -> Counters:
        """The numbers of groups in each state."""
        admitted = self._next_group - len(self._redraw)
        return Counters(
            admitted=admitted,
            rolled_back=self._attempts - admitted,
            in_flight=len(self._in_flight),
            replaced=len(self._replaced),
            ready=len(self._ready),
            taken=sum(taken.total for taken in self._taken.values()),
            reusable=len(self._reusable),
            reused=self._reused,
            **self._done,
        )

    @property
    def in_flight(self) -> frozenset[int]:
        """Ids of the groups that have started and not finished."""
        return frozenset(self._in_flight)

    @property
    def unsettled(self) -> list[int]:
        """Ids of the groups that have started but whose end is not committed, sorted."""
        taken = [group for each in self._taken.values() for group in each.ok + each.failed + each.replaced]
        return sorted([*self._in_flight, *self._replaced, *self._ready, *taken, *self._redraw])

    def state_dict(self) -> dict[str, Any]:
        """Return the committed history as JSON content. Unsettled groups are redrawn under the same ids.

        Reusable groups are not part of it: a resumed run does not reuse them.
        """
        return {
            "steps": self._committed_steps,
            "done": dict(self._done),
            "reused": self._reused,
            "version": self.version,
            "next_group": self._next_group,
            "unsettled": self.unsettled,
            "attempts": self._attempts,
        }

    def load_state_dict(self, state: dict[str, Any], attempts: int = 0) -> None:
        """Go back to a committed history; its unsettled groups are admitted again before new ones.

        `attempts`: how many groups any process has started so far; those outside the history count as rolled back.
        The batch size may differ from the saved one.
        """
        self._done = dict(state["done"])
        self._reused = int(state.get("reused", 0))  # earlier histories had no such groups
        self._committed_steps = int(state["steps"])
        self.version = int(state["version"])
        self._next_group = int(state["next_group"])
        self._redraw = list(state["unsettled"])
        self._in_flight, self._ready = GroupsInFlight(), ReadyGroups(by_id=self.pace.in_turns)
        self._taken, self._replaced = {}, []
        self._reusable, self._released = ReusableGroups(self.max_uses), []
        self._attempts = max(attempts, self._attempts, int(state["attempts"]))
        self._base, self._held = None, set()
        settings = {"groups": self.groups, "refill": self.refill, "steps": self.steps}
        begin = {"event": "begin", **settings, "pace": asdict(self.pace), "state": state, "attempts": attempts}
        self._record(begin | self._if_reusing(max_uses=self.max_uses))
