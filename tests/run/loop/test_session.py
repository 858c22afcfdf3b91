"""The session: the order in which its parts are built, resumed, saved and ended."""

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.algorithms.filters import ShapedBatch
from megarl.common.errors import ConfigError
from megarl.run.loop.monitor import AlarmSkipsStep
from megarl.run.loop.session import LastSaveFailed
from megarl.run.step.plan import GroupOutcome, StepPlan
from megarl.trainer.policy import NonFiniteError
from tests.support.trainer.configs import config as config_of
from tests.support.trainer.fake_session import FakeRun, fake_run
from tests.support.trainer.old_records import OLD_RECORD

PARTS = ("rollout", "summary", "totals", "files", "metrics")
MONITOR: dict[str, list[object]] = {"rules": [], "quarantines": [], "engine_since": []}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    config = config_of("model", run__dir=str(tmp_path), run__steps=5, timeouts__save_s=90)
    return fake_run(config, monkeypatch)


def test_a_new_run_is_built_before_the_engines_are_awaited(run: FakeRun) -> None:
    session = run.build()
    assert run.journal == [
        "parallel state",
        "policy",
        "attach",
        "connect the sender to handles",
        "install the stop vote",
    ]
    assert (session.first_step, session.steps_done, session.version, session.stopped) == (0, 0, 0, None)
    assert [part.key for part in session.parts] == [*PARTS, "evaluations", "monitor"]


def test_engines_on_shared_gpus_start_before_the_policy_is_built_and_while_it_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool replaces engines that an earlier start of the ranks has left in a weight sync when these attach."""
    run = fake_run(config_of("model", run__dir=str(tmp_path), rollout__share_gpus=True), monkeypatch)
    run.build()
    assert run.journal[:6] == [
        "engines sleep", "parallel state", "policy",
        "hold nothing", "attach", "hold frozen, gradients, optimizer, weights",
    ]  # fmt: skip


def test_ranks_that_resolved_auto_differently_end_before_anything_is_built(run: FakeRun) -> None:
    """A rank whose GPU has less memory would cut its micro-batches elsewhere, and hang the others."""
    run.gather = lambda mine, codec: [mine, ("full", mine[1])]
    with pytest.raises(ConfigError, match=r"differ in memory.*auto.*full.*set trainer\.device_memory_gib"):
        run.build()
    assert run.journal == []


def test_a_resumed_run_loads_every_part_before_it_attaches_to_the_pool(run: FakeRun) -> None:
    """The pool needs the resumed history when it begins; files are cut before anything is loaded."""
    run.record = {**OLD_RECORD, "version": 7}
    session = run.build()
    assert run.journal == [
        "parallel state",
        "policy",
        "cut files at 3: {'metrics.jsonl': 300}",
        "load the policy",
        *(f"{key} resumes" for key in PARTS),
        "metrics from step 3",
        "attach",
        "connect the sender to handles",
        "install the stop vote",
    ]
    assert (session.first_step, session.steps_done, session.version) == (3, 3, 7)
    assert list(session.steps()) == [3, 4]


def test_a_record_of_the_first_format_has_the_step_as_its_version(run: FakeRun) -> None:
    run.record = OLD_RECORD
    session = run.build()
    assert session.first_step == session.version == 3


def test_the_files_of_another_run_are_not_cut(run: FakeRun) -> None:
    run.record, run.own = OLD_RECORD, False
    run.build()
    assert not [line for line in run.journal if line.startswith("cut")]


def test_a_save_holds_the_version_and_every_part(run: FakeRun) -> None:
    session = run.build()
    session.version = 4
    assert session.save(2, wait=True)
    saved = session.checkpointer.saved[2]  # type: ignore[attr-defined]
    assert saved == {"version": 4} | {key: {"of": key} for key in PARTS} | {"evaluations": {}, "monitor": MONITOR}


def test_a_checkpoint_is_saved_when_it_is_due(run: FakeRun) -> None:
    run.due = {2}
    session = run.build()
    run.journal.clear()
    session.checkpoint(1)
    session.checkpoint(2)
    assert run.journal == ["poll the save", "poll the save", "save 2"]
    assert session.pool.complete is None  # type: ignore[attr-defined]
    session.checkpoint(3)
    assert session.pool.complete == 2  # type: ignore[attr-defined]


def test_a_stop_request_is_saved_at_the_step_where_all_agree(run: FakeRun) -> None:
    run.stop_after = {2: "the time limit is near"}
    session = run.build()
    assert list(session.steps()) == [0, 1]
    assert session.stopped == "the time limit is near" and session.steps_done == 2
    assert run.journal[-1] == "save 2 and wait"
    assert "stopping after 2 of 5 steps: the time limit is near" in session.recorder.said  # type: ignore[attr-defined]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_before_the_first_step_saves_nothing(run: FakeRun, resumed: bool) -> None:
    run.record = OLD_RECORD if resumed else None
    run.stop_after = {0: "SIGTERM", 3: "SIGTERM"}
    session = run.build()
    assert list(session.steps()) == [] and session.stopped == "SIGTERM"
    assert not [line for line in run.journal if line.startswith("save")]


def test_a_resume_with_nothing_left_to_train_says_so(run: FakeRun) -> None:
    run.record = {**OLD_RECORD, "step": 7}
    session = run.build()
    assert list(session.steps()) == []
    message = "the checkpoint has 7 steps and run.steps is 5: nothing is left to train"
    assert message in session.recorder.said  # type: ignore[attr-defined]


def test_a_stop_after_the_last_step_is_a_stop(run: FakeRun) -> None:
    """The evaluation and the export that follow could take longer than the time that is left."""
    run.stop_after = {5: "SIGTERM"}
    session = run.build()
    assert list(session.steps()) == [0, 1, 2, 3, 4] and session.stopped == "SIGTERM"
    assert run.journal[-1] == "save 5 and wait"


@pytest.mark.parametrize(("saved_before", "resumes_at"), [(1, 1), (None, 0)])
def test_a_stop_whose_save_fails_reports_where_the_next_run_resumes(
    run: FakeRun, saved_before: int | None, resumes_at: int
) -> None:
    run.stop_after, run.failing_saves = {2: "SIGTERM"}, {2}
    session = run.build()
    session.checkpointer.newest = saved_before
    assert list(session.steps()) == [0, 1]
    assert session.stopped == "SIGTERM; the checkpoint of step 2 could not be saved"
    assert session.steps_done == resumes_at
    session.finish()
    assert f"step={resumes_at}" in run.journal[-1] and session.lost_its_stop
    assert f"unsaved_steps={2 - resumes_at}" in run.journal[-1]


def test_steps_that_another_run_has_saved_are_not_lost(run: FakeRun) -> None:
    run.record = OLD_RECORD
    run.stop_after, run.failing_saves = {4: "SIGTERM"}, {4}
    session = run.build()
    session.checkpointer.newest = None  # it resumes from a checkpoint of another directory
    assert list(session.steps()) == list(range(session.first_step, 4)) and session.first_step > 0
    assert (session.steps_done, session.unsaved_steps) == (session.first_step, 4 - session.first_step)


@pytest.mark.parametrize(("stopped", "status"), [(None, "finished"), ("SIGTERM", "preempted")])
def test_the_end_of_a_run(run: FakeRun, stopped: str | None, status: str) -> None:
    session = run.build()
    session.steps_done, session.stopped = 5, stopped
    run.journal.clear()
    session.finish()
    record = f"ExitRecord(status='{status}', step=5, reason='{stopped or ''}', unsaved_steps=0)"
    # A node's agent that has read the record expects the rank to end soon, so a save must not come after it.
    assert run.journal == ["complete the save", f"end: {record}"]


def test_a_run_whose_last_save_failed_is_a_failure(run: FakeRun) -> None:
    """Its weights are not on the disk, and a batch script must not take it for a finished one."""
    run.failing_saves = {3, 5}
    session = run.build()
    session.steps_done = 5
    session.save(3)
    session.save(5)
    run.journal.clear()
    with pytest.raises(
        LastSaveFailed, match=r"all 5 steps are trained, but the checkpoint of step 5 could not be saved"
    ):
        session.finish()
    message = "all 5 steps are trained, but the checkpoint of step 5 could not be saved"
    end = f"end: ExitRecord(status='failed', step=0, reason='{message}', unsaved_steps=0)"
    assert run.journal == ["complete the save", end]
    assert session.recorder.summary.failed_saves == 2


def test_a_failed_save_before_a_good_one_only_shows_in_the_summary(run: FakeRun) -> None:
    run.failing_saves = {3}
    session = run.build()
    session.steps_done = 5
    session.save(3)
    session.save(5)
    session.finish()
    assert session.recorder.summary.failed_saves == 1


@pytest.mark.parametrize("failing", ["batches", "sender", "pool", "recorder"])
def test_whatever_fails_to_close_every_other_part_is_closed(
    run: FakeRun, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    session = run.build()
    run.journal.clear()

    def fail(**options: object) -> None:
        raise RuntimeError(f"{failing} does not close")

    monkeypatch.setattr(getattr(session, failing), "close", fail)
    with pytest.raises(RuntimeError, match=f"{failing} does not close"):
        session.close()
    closed = {"sender": "close the sender", "pool": "end the pool", "recorder": "close the recorder"}
    assert run.journal == [text for part, text in closed.items() if part != failing]


@pytest.mark.parametrize("keep", [False, True])
def test_closing_leaves_the_sync_group_before_the_pool_ends(run: FakeRun, keep: bool) -> None:
    session = run.build()
    run.journal.clear()
    session.close(keep_pool=keep)
    assert run.journal == ["close the sender", "disconnect" if keep else "end the pool", "close the recorder"]


def non_finite(updates: int = 0) -> NonFiniteError:
    error = NonFiniteError("step 1: the loss is nan; the batch is kept in failed_batch")
    error.updates = updates
    return error


def test_steps_without_a_finite_loss_are_skipped_at_most_so_often_and_their_groups_have_failed(run: FakeRun) -> None:
    session = run.build()
    outcome = GroupOutcome(trained=3, filtered=1, dropped_stale=0, failed=1)
    plan = StepPlan({}, ShapedBatch([[]] * 3, trained_groups=3), [[["a"]]], outcome, version=1)
    for _ in range(2):
        skipped = session.skip(non_finite(), plan)
        assert skipped.outcome == GroupOutcome(trained=0, filtered=1, dropped_stale=0, failed=4)
        assert skipped.mini_batches == [] and skipped.trained_groups == []
    assert "the batch is kept in failed_batch; the step is skipped (2 of at most 2)" in session.recorder.said[-1]  # type: ignore[attr-defined]
    with pytest.raises(NonFiniteError):
        session.skip(non_finite(), plan)


def test_a_step_that_has_changed_weights_or_trains_groups_again_is_not_skipped(run: FakeRun) -> None:
    session = run.build()
    plan = StepPlan({}, ShapedBatch([]), [], GroupOutcome(1, 0, 0, 0), version=1)
    with pytest.raises(NonFiniteError):
        session.skip(non_finite(updates=1), plan)
    with pytest.raises(NonFiniteError):
        session.skip(non_finite(), replace(plan, reused=frozenset({4})))


def test_steps_that_alarms_skip_have_a_bound_of_their_own_and_their_groups_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megarl.run.loop.session.MOST_SKIPPED_BY_ALARMS", 1)
    run = fake_run(config_of("model", run__dir=str(tmp_path)), monkeypatch)
    session = run.build()
    outcome = GroupOutcome(trained=3, filtered=1, dropped_stale=0, failed=1)
    plan = StepPlan({}, ShapedBatch([[]] * 3, trained_groups=3), [[["a"]]], outcome, version=1)
    session.skip(non_finite(), plan)
    skipped = session.skip(AlarmSkipsStep("alarm k3_kl"), plan)
    assert skipped.outcome == GroupOutcome(trained=0, filtered=1, dropped_stale=0, failed=4)
    assert session.recorder.said[-1] == "alarm k3_kl; the step is skipped (1 of at most 1)"  # type: ignore[attr-defined]
    with pytest.raises(AlarmSkipsStep):
        session.skip(AlarmSkipsStep("alarm k3_kl"), plan)
    session.skip(non_finite(), plan)
