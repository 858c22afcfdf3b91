"""Admission of prompt groups and the exact count of how each of them ends. Pure: no clock, no tasks, no processes.

Invariant: every admitted group ends as exactly one of trained, filtered, dropped_stale, failed; at every moment
`admitted == in_flight + ready + taken + trained + filtered + dropped_stale + failed`.

A group belongs to no step until it is taken. With staleness 0 (synchronous training) the groups admitted for version v
are exactly [v * groups, (v + 1) * groups). `failed` groups count towards their step: they are not redrawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counters:
    """Numbers of prompt groups since the start of the committed history."""

    admitted: int = 0
    in_flight: int = 0
    ready: int = 0  # in the queue, not yet taken
    taken: int = 0  # by a step that is not committed
    trained: int = 0
    filtered: int = 0
    dropped_stale: int = 0
    failed: int = 0
    rolled_back: int = 0  # attempts that a resume has discarded; not part of the history

    @property
    def settled(self) -> int:
        """Groups whose end is committed."""
        return self.trained + self.filtered + self.dropped_stale + self.failed

    @property
    def balanced(self) -> bool:
        """True if the invariant of the module's docstring holds."""
        return self.admitted == self.in_flight + self.ready + self.taken + self.settled


class Admission:
    """The state machine that decides which prompt groups may start, and counts how they end.

    `groups`: groups per step (>= 1). `max_staleness`: versions by which sampling may be ahead of training (>= 0).
    """

    def __init__(self, groups: int, max_staleness: int = 0) -> None:
        if groups < 1 or max_staleness < 0:
            raise ValueError(f"admission needs groups >= 1 and max_staleness >= 0, got {groups}, {max_staleness}")
        self.groups = groups
        self.max_staleness = max_staleness
        self.version = -1
        self._next_group = 0
        self._redraw: list[int] = []  # rolled back; admitted again before any new group
        self._in_flight: set[int] = set()
        self._finished: dict[int, bool] = {}  # group -> ok, in order of completion, not yet taken
        self._taken: dict[int, tuple[list[int], list[int]]] = {}  # step -> (ok groups, failed groups)
        self._done: dict[str, int] = {"trained": 0, "filtered": 0, "dropped_stale": 0, "failed": 0}
        self._committed_steps: int = 0
        self._attempts = 0  # groups ever started, those that a resume has discarded included
        # (version, groups admitted) from which capacity counts: at the first version that is set in this history.
        self._base: tuple[int, int] | None = None

    def set_version(self, version: int) -> None:
        """Record that the engines serve `version`. Raises ValueError if it is lower than the last one."""
        if version < self.version:
            raise ValueError(f"weight version went back from {self.version} to {version}")
        self.version = version
        if self._base is None:
            self._base = (version, self.counters.admitted)

    @property
    def capacity(self) -> int:
        """The number of groups that may have been admitted in total at this version."""
        if self._base is None:
            return 0
        version, admitted = self._base
        return admitted + (self.version - version + 1 + self.max_staleness) * self.groups

    @property
    def attempts(self) -> int:
        """The number of groups ever started: `admitted + rolled_back`."""
        return self._attempts

    def admit(self) -> list[int]:
        """Return the ids of the groups that may start now, and count them as in flight."""
        room = max(0, self.capacity - self.counters.admitted)
        redrawn, self._redraw = self._redraw[:room], self._redraw[room:]
        fresh = list(range(self._next_group, self._next_group + room - len(redrawn)))
        self._next_group += len(fresh)
        self._attempts += len(redrawn) + len(fresh)
        self._in_flight.update(redrawn, fresh)
        return redrawn + fresh

    def finish(self, group: int, ok: bool) -> None:
        """Record that `group` has been sampled and scored. `ok` is False if it cannot be trained on.

        Raises ValueError if it is not in flight.
        """
        if group not in self._in_flight:
            raise ValueError(f"group {group} is not in flight")
        self._in_flight.remove(group)
        self._finished[group] = ok

    def batch(self, step: int) -> tuple[list[int], list[int]] | None:
        """Take the groups of `step`: (trainable, failed), each sorted; None while too few are ready.

        A second call for the same step returns the same groups. Raises ValueError for a step out of order.
        """
        if step in self._taken:
            return self._taken[step]
        if step != self._committed_steps + len(self._taken):
            expected = self._committed_steps + len(self._taken)
            raise ValueError(f"batches are taken in order: step {step} was requested, but {expected} is next")
        if len(self._finished) < self.groups:
            return None
        # The first that finished. With staleness 0 there are no others, so the order of completion cannot matter.
        chosen = list(self._finished)[: self.groups]
        taken = (sorted(g for g in chosen if self._finished[g]), sorted(g for g in chosen if not self._finished[g]))
        for group in chosen:
            del self._finished[group]
        self._taken[step] = taken
        return taken

    def commit(self, step: int, *, trained: int, filtered: int, dropped_stale: int, failed: int) -> None:
        """Settle every group of `step`. Raises ValueError unless the numbers account for each of them once.

        `failed` includes the groups that `batch` already reported as failed.
        """
        if step not in self._taken:
            raise ValueError(f"step {step} was never taken, or is already committed")
        numbers = {"trained": trained, "filtered": filtered, "dropped_stale": dropped_stale, "failed": failed}
        ok, bad = self._taken[step]
        total = len(ok) + len(bad)
        if min(numbers.values()) < 0 or sum(numbers.values()) != total or failed < len(bad):
            raise ValueError(
                f"step {step}: {numbers} do not account for its {total} groups, {len(bad)} of them failed in rollout"
            )
        del self._taken[step]
        self._committed_steps += 1
        for name, number in numbers.items():
            self._done[name] += number

    @property
    def counters(self) -> Counters:
        """The numbers of groups in each state."""
        admitted = self._next_group - len(self._redraw)
        return Counters(
            admitted=admitted,
            rolled_back=self._attempts - admitted,
            in_flight=len(self._in_flight),
            ready=len(self._finished),
            taken=sum(len(ok) + len(bad) for ok, bad in self._taken.values()),
            **self._done,
        )

    @property
    def in_flight(self) -> frozenset[int]:
        """Ids of the groups that have started and not finished."""
        return frozenset(self._in_flight)

    @property
    def unsettled(self) -> list[int]:
        """Ids of the groups that have started but whose end is not committed, sorted."""
        taken = [group for ok, bad in self._taken.values() for group in ok + bad]
        return sorted([*self._in_flight, *self._finished, *taken, *self._redraw])

    def state_dict(self) -> dict[str, Any]:
        """Return the committed history as JSON content. Unsettled groups are redrawn under the same ids."""
        return {
            "steps": self._committed_steps,
            "done": dict(self._done),
            "version": self.version,
            "next_group": self._next_group,
            "unsettled": self.unsettled,
            "attempts": self._attempts,
        }

    def load_state_dict(self, state: dict[str, Any], attempts: int = 0) -> None:
        """Go back to a committed history; its unsettled groups are admitted again before new ones.

        `attempts`: number of groups that any process has started so far; those that the history does not contain
        count as rolled back. The batch size may differ from the saved one: capacity counts from here.
        """
        self._done = dict(state["done"])
        self._committed_steps = int(state["steps"])
        self.version = int(state["version"])
        self._next_group = int(state["next_group"])
        self._redraw = list(state["unsettled"])
        self._in_flight, self._finished, self._taken = set(), {}, {}
        self._attempts = max(attempts, self._attempts, int(state["attempts"]))
        self._base = None


def usable_samples(statuses: Iterable[str], minimum: int = 2) -> bool:
    """Tell whether a group can be trained on: at least `minimum` samples are ok, as an advantage compares samples."""
    return sum(status == "ok" for status in statuses) >= minimum
