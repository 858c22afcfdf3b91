"""Runs with shared GPUs that publish after several steps: engines generate all of these, and then sleep until the end.

A run with GPUs for each side trains a step as soon as enough groups have finished, whichever they are. Compared are
runs in which steps take their groups in the order of their ids (`tests/support/agents/in_turns.py`).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.queue.dump import DumpedBatch, read_batch
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.models.tensors import differing
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, train
from tests.support.runs.whole_runs import check_every_group_once, config_of, start_run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, INTERVAL = 5, 2  # the last interval is shorter
GROUPS = 4
# What depends on the time, on the machine or on the mode.
DIFFERENT = ("time/", "perf/", "memory/", "system/", "sync/", "rollout/", "total/", "step_time", "wall_time")
FAULTY_ENTRY = ("-m", "tests.support.shared_gpus.stream_faults")


def config(directory: Path, *, shared: bool = True, interval: int = INTERVAL, **sections: Any) -> dict[str, Any]:
    stream = {"mode": "stream", "sync_interval": interval}
    none = {"every": 0, "sets": []}
    settings = {"checkpoint": {"every": interval}, "evaluation": none, "run": {"export": True}} | sections
    made = config_of(directory, steps=STEPS, rollout={"share_gpus": shared, "max_model_len": 256}, **settings)
    made["admission"] = {**stream, **made.get("admission", {})}
    return made


def faulty(settings: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run with one of the faults of `tests/support/shared_gpus/stream_faults.py`."""
    monkeypatch.setenv("STREAM_FAULT", fault)
    process = start_run(settings, script=FAULTY_ENTRY)
    output, _ = process.communicate(timeout=900)
    return Run(process.returncode, output, Path(settings["run"]["dir"]))


def batches(run: Run) -> list[DumpedBatch]:
    return [read_batch(run.directory / "batches", step) for step in range(len(run.metrics))]


def versions(run: Run) -> list[set[int]]:
    """The versions of each step's tokens."""
    return [{span.version for row in batch.trajectories for span in row.versions} for batch in batches(run)]


def published(run: Run) -> list[int]:
    return [record["sync/version"] for record in run.metrics if "sync/version" in record]


def numbers(run: Run) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if not name.startswith(DIFFERENT)} for record in run.metrics]


def test_they_train_the_same_batches_to_the_same_weights_in_every_bit(tmp_path: Path) -> None:
    """With a resume after the first publication."""
    sections = {"agent": {"loop": "tests.support.agents.in_turns:InTurns"}, "algorithm": {"kl": {"coef": 0.01}}}
    settings = [config(tmp_path / str(shared), shared=shared, **sections) for shared in (False, True)]
    disjoint, begun = train(settings[0]), train(settings[1], f"run.steps={INTERVAL}")
    shared = train(settings[1])
    for run in (disjoint, begun, shared):
        assert run.code == 0, run.output[-4000:]
    assert "resuming from" in shared.output
    assert published(shared) == published(disjoint) == [2, 4, 5]
    assert versions(shared) == [{0}, {0}, {2}, {2}, {4}]
    for step, batch in enumerate(batches(shared)):
        assert sorted({row.group_id for row in batch.trajectories}) == [GROUPS * step + i for i in range(GROUPS)]
    assert batches(shared) == batches(disjoint)
    ours, theirs = numbers(shared), numbers(disjoint)
    assert len(ours[0]) > 20 and ours == theirs
    assert differing(shared.directory / "hf", disjoint.directory / "hf") == []


def test_evaluations_saves_and_a_stop_between_two_publications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups without signal are replaced meanwhile. The run goes on in the middle of an interval."""
    settings = config(
        tmp_path, interval=3, checkpoint={"every": 1}, run={"deterministic": False}, admission={"refill": True},
        reward={"function": "tests.support.rewards.reward_functions:even_sums_are_equal"},
        evaluation={"every": 2, "sets": [{"name": "heldout", "path": str(tmp_path / "heldout.jsonl")}]},
    )  # fmt: skip
    settings["rollout"]["journal_s"] = 0.2
    stopped = faulty(settings, "stop", monkeypatch)
    assert stopped.code == 0 and stopped.summary["exit"] == "preempted", stopped.output[-4000:]
    assert len(stopped.metrics) == CheckpointDirectory(stopped.directory / "checkpoints").steps()[-1] == 2
    run = train(settings)
    assert run.code == 0, run.output[-4000:]
    check_every_group_once(run, STEPS)
    assert [max(each) for each in versions(run)[:2]] == [0, 0] and [min(each) for each in versions(run)[3:]] == [3, 3]
    assert max(versions(run)[2]) <= 2, "its groups were generated before the stop, or after it"
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    reports = [line for line in lines if "eval/version" in line]
    assert [(each["eval/step"], each["eval/newest_version"]) for each in reports] == [(n, n) for n in (0, 2, 4, 5)]
    assert sum(record["rollout/groups_replaced"] for record in run.metrics) > 0
    schedule = replay_schedule(read_schedule(run.directory / SCHEDULE_FILE))
    for step, batch in enumerate(batches(run)):
        schedule[step].check(batch)


def test_a_controller_that_dies_while_the_trainer_works_costs_one_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines sleep. Its queue had the groups of the next steps, and nobody has them any more."""
    settings = config(tmp_path, interval=3)
    settings["rollout"]["partial_rollout"] = False  # the publication does not wait for engines that sleep
    run = faulty(settings, "controller", monkeypatch)
    assert run.code == 0, run.output[-5000:]
    assert "groups up to the next publication are missing" in run.output
    check_every_group_once(run, STEPS)
    assert versions(run) == [{0}, {1}, {1}, {3}, {3}] and published(run) == [1, 3, 5]
    assert_nothing_left(run.directory)
