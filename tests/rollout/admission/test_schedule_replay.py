"""A recorded schedule gives the recorded batches again; whatever is changed in it is found."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from megarl.config.derived.staleness import Pace, pace_of
from megarl.queue.dump import DumpedBatch
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import Event
from megarl.run.step.plan import plan_step
from tests.support.machines.admission_machine import AdmissionMachine
from tests.support.machines.schedule_replay import ScheduledBatch, ScheduleMismatch, replay_schedule
from tests.support.trainer.configs import config as config_of

Batches = dict[int, tuple[list[int], list[int], list[int], int | None, list[int]]]
PACE = Pace(1, 2, 3)


def batches_of(schedule: dict[int, ScheduledBatch]) -> Batches:
    return {
        step: (each.ok, each.failed, each.replaced, each.dropped_stale, each.reused) for step, each in schedule.items()
    }


class RecordingMachine(AdmissionMachine):
    """Replays what it has recorded at the end, from its JSON form, and compares it with what it saw."""

    compared: ClassVar[list[Batches]] = []  # of all examples

    def make(self, groups: int, pace: Pace, refill: int) -> Admission:
        self.events = getattr(self, "events", [])
        self.taken: Batches = getattr(self, "taken", {})
        machine = self

        class Noting(Admission):
            def commit(self, step: int, *, dropped_stale: int, **others: Any) -> None:
                ok, failed = self.batch(step) or ([], [])
                machine.taken[step] = (
                    ok,
                    failed,
                    self.taken(step).replaced,
                    dropped_stale,
                    sorted(self.taken(step).reused),
                )
                super().commit(step, dropped_stale=dropped_stale, **others)

        record = self.events.append
        made = Noting(groups, pace, refill=refill, max_uses=self.max_uses, record=record)
        if not self.events:  # else the attempt begins with the state that the machine resumes
            made.load_state_dict(made.state_dict())
        return made

    def teardown(self) -> None:
        if hasattr(self, "events"):
            assert batches_of(replay_schedule(json.loads(json.dumps(self.events)))) == self.taken
            self.compared.append(self.taken)


def test_any_schedule_gives_its_batches_again() -> None:
    RecordingMachine.compared.clear()
    run_state_machine_as_test(
        RecordingMachine, settings=settings(max_examples=60, stateful_step_count=40, deadline=None)
    )
    batches = [batch for taken in RecordingMachine.compared for batch in taken.values()]
    assert len(batches) >= 40, "the examples hold so few batches that they show little"
    assert any(failed and replaced for _, failed, replaced, _, _ in batches)


def recorded() -> tuple[list[Event], Batches]:
    """Three steps, a resume from the checkpoint of the second, and the third one again, with groups of before."""
    events: list[Event] = []
    taken: Batches = {}

    def take(step: int, **numbers: int) -> None:
        batch = admission.batch(step)
        assert batch is not None
        ends = {"trained": 0, "filtered": 0, "dropped_stale": 0, "failed": 0} | numbers
        taken[step] = (
            *batch,
            admission.taken(step).replaced,
            ends["dropped_stale"],
            sorted(admission.taken(step).reused),
        )
        admission.commit(step, **ends)

    admission = Admission(2, PACE, refill=1, record=events.append)
    admission.load_state_dict(admission.state_dict())
    admission.announce(0)
    admission.set_version(0)
    admission.admit()  # 0 to 7
    admission.replace(1, {0})
    for group in (3, 0, 2, 5):
        admission.finish(group, group != 0, {0})
    take(0, trained=1, filtered=1, failed=1)
    take(1, trained=1, dropped_stale=1)
    saved = copy.deepcopy(admission.state_dict())
    admission.announce(2)
    admission.set_version(2)
    admission.admit()
    for group in (7, 4, 6):
        admission.finish(group, True, {0, 2})
    take(2, trained=2)
    admission = Admission(2, PACE, refill=1, record=events.append)
    admission.load_state_dict(saved, attempts=12)
    admission.announce(2)
    admission.set_version(2)
    admission.keep({7: {0}, 9: {2}})
    admission.admit()
    for group in (9, 7, 4):
        admission.finish(group, True, {2} if group != 7 else {0})
    take(2, trained=2)
    return json.loads(json.dumps(events)), taken


def test_a_resume_replaces_the_steps_after_its_checkpoint() -> None:
    events, taken = recorded()
    found = batches_of(replay_schedule(events))
    assert found == taken and set(taken) == {0, 1, 2}
    first_attempt = [n for n, event in enumerate(events) if event["event"] == "begin"][1]
    before = batches_of(replay_schedule(events[:first_attempt]))
    assert before[2] != taken[2] and {step: before[step] for step in (0, 1)} == {step: taken[step] for step in (0, 1)}
    assert taken[1][3] == 1 and taken[0][2] == [1]


def changed(kind: str, change: Callable[[Event], Any], which: int = 0) -> tuple[list[Event], int]:
    """The recorded events with a change in one of a kind, and its number in the file."""
    events, _ = recorded()
    index = [n for n, event in enumerate(events) if event["event"] == kind][which]
    change(events[index])
    return events, index + 1


@pytest.mark.parametrize(
    ("kind", "change", "which", "message"),
    [
        ("admit", lambda e: e["groups"].append(99), 0, "groups that start: recorded .*99"),
        ("admit", lambda e: e["groups"].pop(), 1, "groups that start"),
        ("batch", lambda e: e["ok"].append(e["failed"].pop()), 0, r"batch of step 0 \(trainable, failed\): recorded"),
        ("batch", lambda e: e.update(replaced=[]), 0, r"groups replaced before step 0: recorded \[\], replayed \[1\]"),
        ("batch", lambda e: e.update(step=3), 1, "batches are taken in order"),
        ("keep", lambda e: e["started"].reverse(), 0, "groups that are used again"),
        ("commit", lambda e: e.update(trained=2), 1, "do not account for its 2 groups"),
        ("finish", lambda e: e.update(group=1), 0, "group 1 is not in flight"),
        ("finish", lambda e: e.update(versions=[7]), 2, "tokens of version 7, which was never published"),
        ("replace", lambda e: e.update(group=40), 0, "group 40 is not in flight"),
        ("set_version", lambda e: e.update(version=-3), 0, "went back from -1 to -3"),
        ("begin", lambda e: e.pop("pace"), 0, "KeyError: 'pace'"),
    ],
)
def test_the_first_difference_is_named(kind: str, change: Callable[[Event], Any], which: int, message: str) -> None:
    events, number = changed(kind, change, which)
    with pytest.raises(ScheduleMismatch, match=rf"^event {number} of the schedule \({kind}\): .*{message}"):
        replay_schedule(events)


@pytest.mark.parametrize("index", range(13))
def test_a_missing_event_of_the_steps_that_a_checkpoint_holds_is_found(index: int) -> None:
    """The exception is `announce`, if `set_version` has said the same before a token had the version."""
    events, taken = recorded()
    left_out = events.pop(index)
    try:
        found = batches_of(replay_schedule(events))
    except ScheduleMismatch:
        return
    assert left_out["event"] == "announce" or found != taken, left_out


def test_events_before_the_first_attempt_are_refused() -> None:
    with pytest.raises(
        ScheduleMismatch, match=r"event 1 of the schedule \(announce\): no attempt of the run has begun"
    ):
        replay_schedule([{"event": "announce", "version": 0}])


def row(group: int, version: int, status: Any = "ok", *, sample: int = 0, part: int = 0) -> Trajectory:
    versions = (VersionSpan(version, 0, 1),)
    return Trajectory(group, sample, [1], [2], [-0.5], versions, "stop", 1.0, status=status, part=part)


def pair(group: int, version: int) -> list[Trajectory]:
    """A group of two samples, of which one is as old as `version`."""
    return [row(group, 5), row(group, version, sample=1)]


def test_a_recorded_batch_is_compared_with_the_schedule() -> None:
    scheduled = ScheduledBatch(5, [1, 4], [2], [], Pace(1, 1, 1), dropped_stale=1)
    batch = DumpedBatch(5, 5, [*pair(1, 5), row(2, 2, "failed"), *pair(4, 3)])
    scheduled.check(batch)
    with pytest.raises(ScheduleMismatch, match=r"step 5: the schedule has groups \[1, 2, 4\], .* \[1, 2\]"):
        scheduled.check(replace(batch, trajectories=batch.trajectories[:3]))
    with pytest.raises(ScheduleMismatch, match=r"step 5: 1 groups were dropped as stale, but 2 .*: \[1, 4\]"):
        scheduled.check(replace(batch, version=7))
    replace(scheduled, dropped_stale=None).check(replace(batch, version=7))  # the step was not committed
    replace(scheduled, ok=[4], reused=[1]).check(batch)
    with pytest.raises(ScheduleMismatch, match=r"step 5: the schedule has groups \[1, 2, 3, 4\], .* \[1, 2, 4\]"):
        replace(scheduled, reused=[3]).check(batch)


SAMPLE = st.lists(
    st.tuples(st.integers(2, 5), st.sampled_from(["ok", "ok", "failed"])), min_size=1, max_size=2
)  # version and status by part


@given(samples=st.lists(SAMPLE, min_size=2, max_size=4))
def test_a_batch_is_dropped_by_the_check_as_by_the_trainer(samples: list[list[tuple[int, str]]]) -> None:
    rows = [
        row(1, version, status, sample=sample, part=part)
        for sample, parts in enumerate(samples)
        for part, (version, status) in enumerate(parts)
    ]
    batch = DumpedBatch(5, 5, rows)
    config = config_of("model", admission={"mode": "async", "sync_interval": 1, "max_staleness": 1})
    plan = plan_step(batch.tags, config, dp_size=1, version=batch.version)
    event("stale" if plan.outcome.dropped_stale else "failed" if plan.outcome.failed else "in time")
    ScheduledBatch(5, [1], [], [], pace_of(config), dropped_stale=plan.outcome.dropped_stale).check(batch)
