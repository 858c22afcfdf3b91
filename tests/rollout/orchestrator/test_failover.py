"""A new controller in place of a dead one: what it gets, and that no group is trained twice or lost."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from megarl.config.derived.staleness import Pace
from megarl.config.schema import Config
from megarl.rollout.admission.admission import Admission
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from megarl.rollout.admission.counters import Counters, StepGroups
from megarl.rollout.orchestrator.failover import Failover, TrainerRecord
from megarl.rollout.orchestrator.step_batches import BatchReady
from tests.support.machines.admission_machine import AdmissionMachine
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.rollout.fake_rollout import LocalController, journalled, local_controller
from tests.support.trainer.configs import config as config_of

GROUPS, SAMPLES = 3, 2
WAIT_S = 5.0


# --- admission


class Noting(Admission):
    """Keeps the history of its last commit, as the trainer does, and its events."""

    def commit(self, step: int, **ends: Any) -> None:
        super().commit(step, **ends)
        self.history = self.state_dict()


class RebuildMachine(AdmissionMachine):
    """Now and then a new admission takes over, with a step in the trainer's hands or without one."""

    def make(self, groups: int, pace: Pace, refill: int) -> Admission:
        self.events: list[Any] = getattr(self, "events", [])
        return Noting(groups, pace, refill=refill, max_uses=self.max_uses, record=self.events.append)

    def publish(self) -> None:
        if self.admission is not getattr(self, "followed", None):
            self.followed: Any = self.admission
            self.base = (self.updates, self.step)
            self.followed.load_state_dict(self.admission.state_dict())
            self.followed.history = self.admission.state_dict()
        super().publish()

    @rule(holds=st.booleans(), starts=st.booleans())
    def rebuild(self, holds: bool, starts: bool) -> None:
        old = self.followed
        held = {self.step: old.taken(self.step)} if holds and old.batch(self.step) is not None else {}
        fresh: Any = self.make(old.groups, self.pace, old.refill)
        fresh.load_state_dict(old.history, old.attempts)
        fresh.history = old.history
        fresh.hold(self.base, held)
        fresh.set_version(self.published)
        self.admission = self.followed = fresh
        self.rows, self.uses = set(), dict.fromkeys(self.uses, self.max_uses)
        self.running, self.replaced = {}, []
        taken = next(iter(held.values()), StepGroups([], [], []))
        groups = [*taken.ok, *taken.failed, *taken.replaced]
        self.seen = sorted([*self.ended, *groups])
        self.oldest = {group: version for group, version in self.oldest.items() if group in self.seen}
        assert fresh.counters.balanced and fresh.counters.taken == len(groups)
        if held:
            if starts:
                self.admit()
            self.commit(taken)

    def commit(self, taken: StepGroups) -> None:
        """Train the step in hand."""
        uses = {"reused": len(taken.reused), "trained_groups": taken.ok} if self.max_uses > 1 else {}
        ended = {"trained": taken.ok, "filtered": taken.replaced, "dropped_stale": [], "failed": taken.failed}
        numbers = {name: len(groups) for name, groups in ended.items()}
        self.admission.commit(self.step, **numbers, **uses, ended=ended)
        assert self.admission.counters.reusable == 0, "rows of another queue are not there to be used again"
        for name, groups in ended.items():
            assert not set(groups) & self.ended.keys()
            self.ended |= dict.fromkeys(groups, name)
        self.uses |= dict.fromkeys(taken.ok, self.max_uses)
        self.reused += len(taken.reused)
        self.admission.take_released()
        self.step += 1
        self.updates += self.pace.updates_per_step
        if self.pace.publishes_after(self.step):
            self.publish()

    def teardown(self) -> None:
        if hasattr(self, "admission"):
            assert sorted(replay_schedule(self.events))[: self.step] == list(range(self.step))


RebuildMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRebuild = RebuildMachine.TestCase


def test_the_bound_counts_from_the_first_version_of_the_history_and_not_from_the_published_one() -> None:
    """Two steps were trained since the publication: tokens of its version are two updates older than they seem."""
    pace = Pace(updates_per_step=1, sync_interval=4, max_staleness=4)
    first = Admission(1, pace)
    first.set_version(0)
    state = {**first.state_dict(), "steps": 2, "next_group": 2, "done": {**first.state_dict()["done"], "trained": 2}}
    fresh = Admission(1, pace)
    fresh.load_state_dict(state)
    fresh.hold((0, 0), {2: StepGroups([2], [], [], {2: 0})})
    fresh.set_version(0)
    assert fresh.steps_within_bound(0) == 5 and fresh.admit() == [3, 4]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ({3: StepGroups([2], [], [])}, r"steps \[3\] are held after 2 committed"),
        ({2: StepGroups([1], [], [])}, "settled or in two"),
        ({2: StepGroups([2], [], []), 3: StepGroups([3], [2], [])}, "settled or in two"),
    ],
)
def test_what_cannot_follow_the_history_is_not_held(held: dict[int, StepGroups], message: str) -> None:
    fresh = Admission(1, Pace())
    fresh.load_state_dict({**fresh.state_dict(), "steps": 2, "next_group": 2})
    with pytest.raises(ValueError, match=message):
        fresh.hold((0, 0), held)
    fresh.set_version(0)
    with pytest.raises(ValueError, match="before the first version"):
        fresh.hold((0, 0), {})


# --- the trainer's record


def batch(step: int) -> BatchReady:
    return BatchReady(step, [], Counters(), {}, [step])


def history(steps: int) -> dict[str, Any]:
    return {"admission": {"steps": steps}}


def test_without_a_trainer_nothing_is_recorded() -> None:
    record = TrainerRecord()
    record.note(announced=3)
    record.published(3, admits=True)
    record.taken(batch(0))
    record.evaluated(["x"])
    record.committed(0, history(1))
    assert record.now is None


def test_only_batches_that_all_ranks_have_read_are_handed_over() -> None:
    record = TrainerRecord()
    record.begun(history(5))
    record.published(5, admits=True)
    for step in (5, 6, 7):
        record.taken(batch(step))
    record.keep(6)
    record.keep(5)
    assert record.now is not None
    assert [each.step for each in record.now.held] == [5, 6] and record.now.base == (5, 5)
    record.committed(5, history(6))
    record.published(9, admits=False)
    assert record.now == Failover(history(6), (batch(6),), version=9, base=(5, 5))
    record.lost()
    with pytest.raises(KeyError):
        record.keep(7)


def test_groups_start_only_where_the_trainer_has_let_them() -> None:
    record = TrainerRecord()
    record.begun(None)
    record.published(0, admits=False)
    assert record.now is not None and not record.now.admits and record.now.base == (0, 0)
    record.note(admits=True, needed=0)
    assert (record.now.admits, record.now.needed) == (True, 0)
    record.note(admits=False)
    assert not record.now.admits, "what began now would be of two versions"
    record.note(announced=1)
    assert record.now.announced == 1
    record.published(1, admits=True)
    assert record.now.announced is None and record.now.admits


def test_an_evaluation_is_handed_over_until_its_reports_are_there() -> None:
    record = TrainerRecord()
    record.begun(None)
    record.note(evaluation="step_2")
    record.evaluated([])
    assert record.now is not None and record.now.evaluation == "step_2"
    record.evaluated(["step_2"])
    assert record.now.evaluation is None


# --- the controller


AHEAD = {"mode": "async", "sync_interval": 1, "max_staleness": 3}


def settings_of(**changes: Any) -> Config:
    return config_of(
        "model", batch={"groups": GROUPS, "samples_per_group": SAMPLES}, admission=AHEAD, rollout={"journal_s": 0.02},
        **changes,
    )  # fmt: skip


class Trainer:
    """Calls a controller and keeps the record, as the client does."""

    def __init__(self, local: LocalController) -> None:
        self.local, self.record = local, TrainerRecord()

    async def begin(self) -> None:
        await self.local.controller.begin(None)
        self.record.begun(None)

    async def publish(self, version: int) -> Counters:
        counters = await self.local.controller.set_version(version)
        self.record.published(version, admits=True)
        return counters

    async def take(self, step: int, keep: bool = True) -> BatchReady:
        batch = await self.local.controller.wait_batch(step, WAIT_S)
        assert isinstance(batch, BatchReady)
        self.record.taken(batch)
        if keep:
            self.record.keep(step)
        return batch

    async def commit(self, batch: BatchReady) -> Counters:
        ended = {"trained": batch.groups, "filtered": [], "dropped_stale": [], "failed": []}
        numbers = {name: len(groups) for name, groups in ended.items()}
        answer = await self.local.controller.commit_and_report(batch.step, **numbers, ended=ended)
        self.record.committed(batch.step, answer.history)
        return answer.counters

    async def rebuild(self, local: LocalController) -> Counters:
        """The old controller ends at once: none of its tasks does anything any more."""
        self.local.controller._tasks.cancel()
        await asyncio.sleep(0)
        self.local = local
        assert self.record.now is not None
        return await local.controller.take_over(self.record.now)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("journal", [True, False])
async def test_a_new_controller_goes_on_after_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    """Step 1 is in training and step 2 was prepared, when the controller dies; step 3 was taken, but not read."""
    chosen = settings_of(telemetry__dump_batches=True, **({} if journal else {"rollout__journal_s": 0}))
    trainer = Trainer(local_controller(chosen, tmp_path, monkeypatch))
    await trainer.begin()
    await trainer.publish(0)
    await trainer.commit(await trainer.take(0))
    await trainer.publish(1)
    in_training, prepared = await trainer.take(1), await trainer.take(2)
    unread = await trainer.take(3, keep=False)
    if journal:
        kept = trainer.local.controller._journal
        await until(lambda: set(unread.groups) <= set(journalled(tmp_path)) and not kept._pending)
    marked = dict(trainer.local.queue.rows)
    counters = await trainer.rebuild(local_controller(chosen, tmp_path, monkeypatch))
    fresh = trainer.local
    assert counters.balanced and (counters.trained, counters.taken) == (GROUPS, 2 * GROUPS)
    assert fresh.fleet.taken_over == [False] and fresh.fleet.resets == 0
    assert not set(fresh.queue.rows) & set(in_training.keys + prepared.keys), "they need no row any more"
    counters = await trainer.commit(in_training)
    assert counters.balanced and counters.trained == 2 * GROUPS
    counters = await trainer.publish(2)
    await trainer.commit(prepared)
    again = await trainer.take(3)
    counters = await trainer.commit(again)
    assert again.groups == unread.groups and counters.trained == 4 * GROUPS and counters.balanced
    asked = {group for group in fresh.fleet.sent if isinstance(group, int)}
    assert asked.isdisjoint(in_training.groups + prepared.groups), "nothing is generated twice for them"
    assert asked.isdisjoint(again.groups) == journal, "finished groups come from the journal"
    assert marked.keys() >= set(again.keys)
    batches = replay_schedule(read_schedule(tmp_path / SCHEDULE_FILE))
    assert [sorted(each.ok) for each in list(batches.values())[:4]] == [
        list(range(GROUPS * step, GROUPS * (step + 1))) for step in range(4)
    ]
    await fresh.controller.shutdown()


async def test_a_controller_that_dies_before_the_first_commit_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(local_controller(settings_of(), tmp_path, monkeypatch))
    await trainer.begin()
    counters = await trainer.rebuild(local_controller(settings_of(), tmp_path, monkeypatch))
    assert counters.admitted == 0, "the engines have no weights yet"
    await trainer.publish(0)
    first = await trainer.take(0)
    counters = await trainer.rebuild(local_controller(settings_of(), tmp_path, monkeypatch))
    assert counters.taken == GROUPS
    assert (await trainer.commit(first)).trained == GROUPS
    await trainer.local.controller.shutdown()


async def test_in_a_publication_nothing_starts_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines may already have the new version, and then tokens carry it."""
    trainer = Trainer(local_controller(settings_of(), tmp_path, monkeypatch))
    await trainer.begin()
    await trainer.publish(0)
    first = await trainer.take(0)
    await trainer.local.controller.announce(1)
    trainer.record.note(announced=1)
    counters = await trainer.rebuild(local_controller(settings_of(rollout__journal_s=0), tmp_path, monkeypatch))
    assert counters.in_flight == 0 and trainer.local.fleet.taken_over == [True]
    assert (await trainer.publish(1)).in_flight > 0
    assert (await trainer.commit(first)).balanced
    await trainer.local.controller.shutdown()


async def test_the_curriculum_learns_the_rewards_of_the_batches_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(local_controller(settings_of(), tmp_path, monkeypatch))
    await trainer.begin()
    await trainer.publish(0)
    held = await trainer.take(0)
    assert held.rewards == {0: 1.0, 1: 2.0, 2: 3.0}
    await trainer.rebuild(local_controller(settings_of(rollout__journal_s=0), tmp_path, monkeypatch))
    finished = trainer.local.controller._source.finished  # type: ignore[attr-defined]
    assert {group: finished[group] for group in held.groups} == {0: [1.0], 1: [2.0], 2: [3.0]}
    await trainer.local.controller.shutdown()


async def test_an_evaluation_alongside_training_is_begun_again_with_the_version_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(local_controller(settings_of(), tmp_path, monkeypatch))
    await trainer.begin()
    await trainer.publish(0)
    trainer.record.note(evaluation="step_2")
    first = await trainer.take(0)
    await trainer.commit(first)
    await trainer.publish(1)
    await trainer.rebuild(local_controller(settings_of(), tmp_path, monkeypatch))
    [finished] = await trainer.local.controller.take_evaluations(WAIT_S)
    assert (finished.label, finished.version) == ("step_2", 1)
    await trainer.local.controller.shutdown()
