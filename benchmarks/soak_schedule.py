"""The rollout side of the soak's accounting: which groups a schedule.jsonl has started, and what became of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from soak_problems import ENDS, AccountingReport, UnreadableRun


class RolloutSide:
    """Follows the groups of a schedule from event to event; each must be in exactly one place."""

    def __init__(self, report: AccountingReport) -> None:
        self._report = report
        self.admitted: set[int] = set()
        self.in_flight: set[int] = set()
        self.ready: dict[int, bool] = {}
        self.replaced: set[int] = set()
        self.taken: dict[int, dict[str, list[int]]] = {}
        self.commits: dict[int, dict[str, int]] = {}
        self.versions: dict[int, frozenset[int]] = {}  # of the tokens of each group that has finished
        self.published: set[int] = set()
        self.kept: set[int] = set()
        self.starts = self.begins = 0
        self._latest = 0  # groups of the latest event that admitted some
        self.pace: dict[str, int] = {}

    def follow(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Follow all events, and note every one that does not fit what was before it."""
        for number, event in enumerate(events, start=1):
            handler = getattr(self, f"_{event['event']}", None)
            if handler is None:
                raise UnreadableRun(f"line {number} of the schedule is an unknown event: {event['event']!r}")
            handler(event)

    def groups_of(self, step: int) -> list[int]:
        """Return the ids of all groups that a step has taken, replaced ones included."""
        return sorted(group for groups in self.taken.get(step, {}).values() for group in groups)

    def failed_of(self, step: int) -> list[int]:
        """Return the ids of the groups that a step has taken as failed."""
        return sorted(self.taken.get(step, {}).get("failed", []))

    @property
    def settled(self) -> list[int]:
        """The ids of the groups of all committed steps, with repetitions if there are any."""
        return [group for step in self.commits for group in self.groups_of(step)]

    def _wrong(self, text: str) -> None:
        self._report.problems["groups"].append(f"schedule: {text}")

    def _begin(self, event: Mapping[str, Any]) -> None:
        """Go back to the history that an attempt of the run resumes: the steps up to its checkpoint."""
        state, self.pace = event["state"], event["pace"]
        self.begins += 1
        self.taken = {step: each for step, each in self.taken.items() if step < state["steps"]}
        self.commits = {step: each for step, each in self.commits.items() if step < state["steps"]}
        self.admitted = set(range(state["next_group"])) - set(state["unsettled"])
        if self.admitted != set(self.settled):
            self._wrong(f"the history of {state['steps']} steps settles other groups than its steps have")
        self.in_flight, self.ready, self.replaced = set(), {}, set()
        self.published, self.kept = set(), set()
        started = max(event["attempts"], state["attempts"])
        # The controller counts groups on the disk before it starts them, and may have ended in between.
        if started not in (self.starts, self.starts - self._latest) and self.begins > 1:
            self._wrong(f"{self.starts} groups were started, and the next attempt knows of {started}")
        self.starts, self._latest = started, 0

    def _announce(self, event: Mapping[str, Any]) -> None:
        self.published.add(event["version"])

    _set_version = _announce

    def _admit(self, event: Mapping[str, Any]) -> None:
        for group in event["groups"]:
            if group in self.admitted:
                self._wrong(f"group {group} was admitted twice")
            self.admitted.add(group)
            self.in_flight.add(group)
        self.starts += len(event["groups"])
        self._latest = len(event["groups"])

    def _keep(self, event: Mapping[str, Any]) -> None:
        self.admitted |= set(event["started"])
        self.in_flight |= set(event["started"])
        self.kept |= set(event["started"])

    def _hold(self, event: Mapping[str, Any]) -> None:
        """Go on with steps that were taken before `begin`: a new controller was told of them by the trainer."""
        for each in event["taken"]:
            self.taken[each["step"]] = {name: list(each[name]) for name in ("ok", "failed", "replaced")}
            self.admitted |= set(self.groups_of(each["step"]))

    def _land(self, event: Mapping[str, Any]) -> int:
        """Take a group out of flight and note the versions of its tokens."""
        group = int(event["group"])
        if group not in self.in_flight:
            self._wrong(f"group {group} has finished, and was not in flight")
        self.in_flight.discard(group)
        self.versions[group] = frozenset(event["versions"])
        unknown = self.versions[group] - self.published
        if unknown and group not in self.kept:
            text = f"group {group} has finished with tokens of versions {sorted(unknown)}, never published"
            self._report.problems["versions"].append(text)
        return group

    def _finish(self, event: Mapping[str, Any]) -> None:
        self.ready[self._land(event)] = event["ok"]

    def _replace(self, event: Mapping[str, Any]) -> None:
        self.replaced.add(self._land(event))

    def _batch(self, event: Mapping[str, Any]) -> None:
        step = event["step"]
        for name, usable in (("ok", True), ("failed", False)):
            for group in event[name]:
                if self.ready.pop(group, None) is not usable:
                    self._wrong(f"step {step} has taken group {group} as {name}, which it was not")
        if set(event["replaced"]) != self.replaced:
            self._wrong(f"step {step} settles {event['replaced']} as replaced, not {sorted(self.replaced)}")
        self.replaced = set()
        self.taken[step] = {name: list(event[name]) for name in ("ok", "failed", "replaced")}

    def _commit(self, event: Mapping[str, Any]) -> None:
        self.commits[event["step"]] = {end: event[end] for end in ENDS}

    def end_at(self, steps: int) -> None:
        """Forget the commits from step `steps` on, of which a run that was stopped has not told any more."""
        self.commits = {step: each for step, each in self.commits.items() if step < steps}

    @property
    def under_way(self) -> set[int]:
        """The ids of the groups that have a place, and no end."""
        held = {group for step in self.taken.keys() - self.commits.keys() for group in self.groups_of(step)}
        return self.in_flight | self.ready.keys() | self.replaced | held

    def check_end(self, stopped: bool) -> None:
        """Note the groups that were started and have no end; in a run that was `stopped`, those without a place."""
        again = [group for group, times in Counter(self.settled).items() if times > 1]
        if again:
            self._wrong(f"groups {again[:10]} are in two steps")
        if lost := sorted(self.admitted - set(self.settled) - (self.under_way if stopped else set())):
            self._wrong(f"{len(lost)} groups were admitted and have no end: {lost[:10]}")
