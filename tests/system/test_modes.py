"""Whole runs in which generation runs ahead of training."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megarl.common.rundir.run_files import read_exit
from megarl.queue.dump import read_batch
from megarl.queue.trajectory import Trajectory
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from tests.support.agents.straggling_agent import SHORT, STRAGGLERS
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.models.tensors import differing
from tests.support.runs.run import Run, step_records, tiny_config, train
from tests.support.runs.whole_runs import check_every_group_once, replay

pytestmark = pytest.mark.engine

STEPS = 8
ENDS = ("trained", "filtered", "dropped_stale", "failed")


@pytest.mark.parametrize(
    ("section", "updates", "published", "bound", "partial"),
    [
        pytest.param({"mode": "one_step_off"}, 1, 1, 1, False, marks=pytest.mark.slow),
        ({"mode": "async", "sync_interval": 4, "max_staleness": 7}, 2, 4, 7, True),
    ],
    ids=["one_step_off", "async"],
)
def test_generation_runs_ahead_within_the_bound(
    tmp_path: Path, section: dict[str, Any], updates: int, published: int, bound: int, partial: bool
) -> None:
    """It evaluates meanwhile. Without partial rollouts each response is of one version."""
    config = tiny_config(tmp_path, steps=STEPS)
    config["admission"] = section
    config["evaluation"] |= {"every": 2}
    config["rollout"]["replicas"] = 2 if partial else 1
    config["trainer"]["mini_batches"] = updates
    config["rollout"]["partial_rollout"] = partial
    config["telemetry"] = {"dump_batches": True}
    if partial:  # many buckets
        config["weight_sync"] = {"bucket_mb": 0.02}
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    check_every_group_once(run, STEPS)
    records = step_records(run.directory)
    lags: list[int] = []
    for step in range(STEPS):
        batch = read_batch(run.directory / "batches", step)
        assert batch.version == step * updates
        # Its last update is the one in which a token is oldest.
        lags += [batch.version + updates - 1 - row.oldest_version for row in batch.trajectories]
        assert all(span.version % published == 0 for row in batch.trajectories for span in row.versions)
        assert partial or all(len(row.versions) == 1 for row in batch.trajectories)
    assert updates - 1 < max(lags) <= bound, "nothing was generated ahead, or the bound is passed"
    assert [record["sync/version"] for record in records if "sync/version" in record] == [
        version for version in range(updates, STEPS * updates + 1, updates) if version % published == 0
    ]
    assert records[-1]["total/groups_dropped_stale"] == 0
    check_evaluations(run.directory, updates, every=2)
    assert (sum(record["time/drain"] for record in records) > 0) is not partial
    if partial:
        assert all(record["sync/buckets"] > 3 for record in records if "sync/version" in record)
        check_replay(run, tmp_path / "replay")


def check_evaluations(run_dir: Path, updates: int, *, every: int) -> None:
    """Each is reported once, with the versions of its tokens; those that are waited for are of one version."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reports = [line for line in lines if "eval/version" in line]
    assert [report["eval/step"] for report in reports] == list(range(0, STEPS + 1, every))
    for report in reports:
        began, version = report["eval/step"], report["eval/version"]
        oldest, newest = report["eval/oldest_version"], report["eval/newest_version"]
        assert version == began * updates and report["step"] >= began
        waited = began in (0, STEPS)
        assert version <= oldest <= newest <= report["step"] * updates and (newest == version or not waited)
    assert any(report["step"] > report["eval/step"] for report in reports), "the trainer waited for every evaluation"


def check_replay(run: Run, out: Path) -> None:
    """The schedule gives the batches again, and training on them the same weights, bit for bit."""
    schedule = replay_schedule(read_schedule(run.directory / SCHEDULE_FILE))
    for step in range(STEPS):
        schedule[step].check(read_batch(run.directory / "batches", step))
    assert list(schedule) == list(range(STEPS)) and all(each.dropped_stale == 0 for each in schedule.values())
    replay(run, out, 2)
    assert differing(run.directory / "hf", out / "hf") == []


@pytest.mark.slow
def test_a_straggler_of_a_streaming_run_fails_at_its_deadline_and_a_run_without_a_checkpoint_has_failed(
    tmp_path: Path,
) -> None:
    """Four steps per publication. The last one of them waits for the straggler, and no engine is lost for it.

    The place of the checkpoints is no directory, so the run can save none.
    """
    bound = 3
    config = tiny_config(tmp_path, steps=STEPS)
    config["admission"] = {"mode": "stream"}
    config["trainer"]["gpus"] = 1
    config["checkpoint"] = {"every": bound + 1, "dir": str(tmp_path / "disk")}
    (tmp_path / "disk").write_text("not mounted")
    config["agent"] = {"loop": "tests.support.agents.straggling_agent:StragglingAgent"}
    config["trainer"]["micro_batch_tokens"] = 512
    config["evaluation"] = {"sets": []}
    config["sampling"]["max_tokens"] = 100
    config["rollout"] |= {"group_deadline_s": 5.0, "on_group_deadline": "fail", "report_interval_s": 0.5}
    config["telemetry"] = {"dump_batches": True}
    run = train(config, ranks=1)
    check_failed_saves(run, every=bound + 1)
    records = step_records(run.directory)
    batches = [read_batch(run.directory / "batches", step) for step in range(STEPS)]
    ends = {row.group_id: row.status for batch in batches for row in batch.trajectories}
    failed = {group for group, status in ends.items() if status == "failed"}
    assert len(ends) == STEPS * config["batch"]["groups"] and failed >= {group for group in ends if group in STRAGGLERS}
    last = records[-1]
    assert last["total/groups_failed"] == len(failed) < len(ends)
    assert last["total/groups_admitted"] == sum(last[f"total/groups_{end}"] for end in ENDS) == len(ends)
    lengths = [record["rollout/failed_length_max"] for record in records if "rollout/failed_length_max" in record]
    assert max(lengths) > SHORT, "the straggler's tokens vanish"
    assert all(record["rollout/replicas_lost"] == 0 for record in records), "the straggler costs its engine"
    assert [record["sync/version"] for record in records if "sync/version" in record] == [bound + 1, 2 * (bound + 1)]
    trained = [(step, row.oldest_version) for step, batch in enumerate(batches) for row in batch.trajectories
               if row.status == "ok"]  # fmt: skip
    assert max(step - oldest for step, oldest in trained) == bound


def check_failed_saves(run: Run, every: int) -> None:
    """The exit code, exit.json and summary.json say that no step is saved, and the terminal did at each save."""
    assert run.code != 0
    record = read_exit(run.directory)
    assert record is not None and (record.status, record.step) == ("failed", 0), run.output[-4000:]
    assert f"all {STEPS} steps are trained, but the checkpoint of step {STEPS} could not be saved" in record.reason
    assert (run.summary["exit"], run.summary["failed_saves"]) == ("failed", STEPS // every)
    for step in range(every, STEPS + 1, every):
        assert f"the checkpoint of step {step} could NOT be saved: " in run.output


@pytest.mark.slow  # asynchronous: the twins of the DAPO recipes (test_recipe_twins.py)
@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_groups_without_signal_are_replaced(tmp_path: Path, mode: str) -> None:
    """About half of the problems have equal rewards; every step trains its number of groups all the same."""
    steps, groups = 3, 4
    config = tiny_config(tmp_path, steps=steps)
    config["admission"] = {"mode": mode, "refill": True}
    config["reward"]["function"] = "tests.support.rewards.reward_functions:even_sums_are_equal"
    config["telemetry"] = {"dump_batches": True}
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    records, trained = step_records(run.directory), set()
    for step, record in enumerate(records):
        batch = read_batch(run.directory / "batches", step)
        ids = {row.group_id for row in batch.trajectories}
        assert len(ids) == groups == record["groups/trained"] and not ids & trained
        assert all(len({row.reward for row in batch.trajectories if row.group_id == group}) > 1 for group in ids)
        assert record["groups/filtered"] == record["rollout/groups_replaced"]
        assert record["groups/admitted"] == groups + record["rollout/groups_replaced"]
        trained |= ids
    last = records[-1]
    assert last["total/groups_admitted"] == steps * groups + last["total/groups_filtered"]
    assert last["total/groups_filtered"] > 0, "nothing was replaced"
    if mode == "sync":  # every group up to the last trained one was trained or replaced
        assert last["total/groups_admitted"] == max(trained) + 1


@pytest.mark.slow
def test_groups_are_used_again_while_engines_are_slow_and_all_counts_agree(tmp_path: Path) -> None:
    """One engine generates the samples of one group at a time, so the trainer fills its steps up."""
    groups, uses, bound = 4, 2, 3
    config = tiny_config(tmp_path, steps=STEPS)
    config["admission"] = {"mode": "async", "sync_interval": 1, "max_staleness": bound, "max_uses": uses}
    config["sampling"]["max_tokens"] = 64
    config["rollout"]["max_num_seqs"] = config["batch"]["samples_per_group"]
    config["telemetry"] = {"dump_batches": True}
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    records = step_records(run.directory)
    schedule = replay_schedule(read_schedule(run.directory / SCHEDULE_FILE))
    assert list(schedule) == list(range(STEPS)) and len(records) == STEPS
    trained: Counter[int] = Counter()  # uses of each group
    for step, record in enumerate(records):
        batch, taken = read_batch(run.directory / "batches", step), schedule[step]
        taken.check(batch)
        ids = sorted({row.group_id for row in batch.trajectories})
        assert ids == sorted(taken.ok + taken.failed + taken.reused) and len(ids) == groups
        new = taken.ok + taken.failed
        assert taken.ok and not set(new) & trained.keys() and set(taken.reused) <= trained.keys()
        assert record["groups/reused"] == len(taken.reused)
        assert record["groups/admitted"] == len(new) == sum(record[f"groups/{end}"] for end in ENDS)
        signal = {group for group in taken.ok if len(rewards_of(batch.trajectories, group)) > 1}
        assert record["groups/trained"] == len(signal), "the rewards say which groups are trained"
        assert step - min(row.oldest_version for row in batch.trajectories) <= bound
        trained.update([*signal, *taken.reused])
    assert max(trained.values()) == uses, "no group was used again"
    last = records[-1]
    assert last["total/groups_reused"] == trained.total() - len(trained) > 0
    assert last["total/groups_trained"] == len(trained)
    admitted = {group for each in schedule.values() for group in each.ok + each.failed}
    assert last["total/groups_admitted"] == len(admitted) == sum(last[f"total/groups_{end}"] for end in ENDS)
    commits = [event for event in read_schedule(run.directory / SCHEDULE_FILE) if event["event"] == "commit"]
    for end in (*ENDS, "reused"):
        assert sum(event[end] for event in commits) == last[f"total/groups_{end}"], "both sides count alike"


def rewards_of(rows: list[Trajectory], group: int) -> set[float]:
    return {row.reward for row in rows if row.group_id == group}
