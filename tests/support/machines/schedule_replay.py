"""Replays a recorded schedule (`admission_log.py`) through a fresh admission. Pure but for `read_schedule`.

Admission depends on nothing but the events, so the same events must give the same groups and batches.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

from megarl.algorithms.filters import alive_samples
from megarl.config.derived.staleness import Pace
from megarl.queue.dump import DumpedBatch
from megarl.queue.trajectory import SampleTag
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import Event
from megarl.rollout.admission.counters import StepGroups
from megarl.rollout.admission.groups_in_flight import ReplayUse


class ScheduleMismatch(ValueError):
    """A schedule is not what its own events give, or not that of the recorded batches; the message names the place."""


@dataclass(frozen=True)
class ScheduledBatch:
    """The groups that a step has taken: trainable ones and failed ones, and those that were replaced before it.

    `pace`: that of the attempt of the run. `dropped_stale`, `trained`: how many groups were too old, and how many the
    step was the first to train; None if it was not committed. `reused`: further ones, which earlier steps have trained.
    """

    step: int
    ok: list[int]
    failed: list[int]
    replaced: list[int]
    pace: Pace
    dropped_stale: int | None = None
    trained: int | None = None
    reused: list[int] = field(default_factory=list)

    def check(self, batch: DumpedBatch) -> None:
        """Raise ScheduleMismatch unless a recorded batch has these groups, and as many that are too old."""
        found = {group: list(rows) for group, rows in groupby(batch.tags, key=lambda tag: tag.group_id)}
        if (groups := sorted(found)) != (taken := sorted(self.ok + self.failed + self.reused)):
            raise ScheduleMismatch(f"step {self.step}: the schedule has groups {taken}, the recorded batch {groups}")
        oldest = batch.version + self.pace.updates_per_step - 1 - self.pace.max_staleness
        stale = [group for group in groups if _is_stale(found[group], oldest)]
        if self.dropped_stale is not None and len(stale) != self.dropped_stale:
            raise ScheduleMismatch(
                f"step {self.step}: {self.dropped_stale} groups were dropped as stale, but {len(stale)} of the "
                f"recorded batch are too old: {stale}"
            )


def _is_stale(group: Sequence[SampleTag], oldest: int) -> bool:
    """Return whether the trainer drops a group as stale. With too few usable samples it has failed, however old."""
    usable = alive_samples(group)
    return len(usable) >= 2 and any(
        not row.demonstrated and row.oldest_version < oldest for rows in usable for row in rows
    )


def read_schedule(path: Path) -> list[Event]:
    """Return the events of a file; an incomplete last line, of a process that was killed, is left out.

    Raises ScheduleMismatch naming the line that is not an event.
    """
    events: list[Event] = []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            known = event["event"] in _EVENTS
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise ScheduleMismatch(f"{path}, line {number}: no event of a schedule: {line[:80]!r}")
        events.append(event)
    return events


def replay_schedule(events: Iterable[Event]) -> dict[int, ScheduledBatch]:
    """Replay all attempts of a run; return the batches of the last history by step.

    Raises ScheduleMismatch naming the first event, counted from 1 as the lines of the file, at which admission decides
    something else than was recorded, or which it refuses.
    """
    replay = _Replay()
    for number, event in enumerate(events, start=1):
        try:
            getattr(replay, event["event"])(event)
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            text = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ScheduleMismatch(f"event {number} of the schedule ({event['event']}): {text}") from error
    return replay.batches


class _Replay:
    """An admission, and the batches that it has given so far. It has a method for each of `_EVENTS`."""

    def __init__(self) -> None:
        self.batches: dict[int, ScheduledBatch] = {}
        self._current: Admission | None = None

    @property
    def admission(self) -> Admission:
        if self._current is None:
            raise ScheduleMismatch("no attempt of the run has begun")
        return self._current

    def begin(self, event: Event) -> None:
        pace = Pace(**event["pace"])
        if event.get("capacity") is not None:
            raise ScheduleMismatch("it was recorded with queue.capacity, and can be replayed by that version only")
        uses = event.get("max_uses", 1)
        self._current = Admission(event["groups"], pace, refill=event["refill"], steps=event["steps"], max_uses=uses)
        self._current.load_state_dict(event["state"], event["attempts"])
        steps = event["state"]["steps"]
        self.batches = {step: batch for step, batch in self.batches.items() if step < steps}

    def announce(self, event: Event) -> None:
        self.admission.announce(event["version"])

    def set_version(self, event: Event) -> None:
        self.admission.set_version(event["version"])

    def admit(self, event: Event) -> None:
        _same("groups that start", event["groups"], self.admission.admit())

    def keep(self, event: Event) -> None:
        started = self.admission.keep({group: frozenset(versions) for group, versions in event["kept"]})
        _same("groups that are used again", event["started"], started)

    def hold(self, event: Event) -> None:
        held = {each["step"]: _taken(each) for each in event["taken"]}
        self.admission.hold((event["base"][0], event["base"][1]), held)
        pace = self.admission.pace
        for step, taken in held.items():
            reused = sorted(taken.reused)
            self.batches[step] = ScheduledBatch(step, taken.ok, taken.failed, taken.replaced, pace, reused=reused)

    def finish(self, event: Event) -> None:
        self.admission.finish(event["group"], event["ok"], event["versions"])

    def replace(self, event: Event) -> None:
        _same("whether the group is replaced", True, self.admission.replace(event["group"], event["versions"]))

    def batch(self, event: Event) -> None:
        step = event["step"]
        taken = self.admission.batch(step)
        _same(f"batch of step {step} (trainable, failed)", (event["ok"], event["failed"]), taken)
        _same(f"groups replaced before step {step}", event["replaced"], self.admission.taken(step).replaced)
        reused = event.get("reused", [])
        _same(f"groups that step {step} uses again", reused, sorted(self.admission.taken(step).reused))
        pace = self.admission.pace
        self.batches[step] = ScheduledBatch(step, event["ok"], event["failed"], event["replaced"], pace, reused=reused)

    def commit(self, event: Event) -> None:
        step, numbers = event["step"], {name: event[name] for name in _ENDS}
        uses = {name: event[name] for name in _USES if name in event}
        self.admission.commit(step, **numbers, **uses)
        counted = {name: numbers[name] for name in ("dropped_stale", "trained")}
        self.batches[step] = replace(self.batches[step], **counted)


_ENDS: Sequence[str] = ("trained", "filtered", "dropped_stale", "failed")
_USES: Sequence[str] = ("reused", "trained_groups")  # where groups may be used again
_EVENTS = ("begin", "announce", "set_version", "admit", "keep", "hold", "finish", "replace", "batch", "commit")


def _taken(content: Event) -> StepGroups:
    """Return what a step had taken, from the content of an event `hold`."""
    reused = {group: ReplayUse(oldest, uses) for group, oldest, uses in content["reused"]}
    return StepGroups(content["ok"], content["failed"], content["replaced"], dict(content["oldest"]), reused)


def _same(what: str, recorded: object, replayed: object) -> None:
    if recorded != replayed:
        raise ScheduleMismatch(f"{what}: recorded {recorded}, replayed {replayed}")
