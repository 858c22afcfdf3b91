"""Runs that are killed and go on: what they are afterwards is what an unbroken run is, bit for bit."""

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.cluster.pool.pool_process import read_state
from megarl.queue.dump import read_batch
from megarl.rollout.resume.group_progress import INTERRUPTED
from megarl.telemetry.trace.files import read_events
from tests.support.models.calling_model import teach_calls
from tests.support.pool.leftovers import assert_nothing_left, of_private_directory
from tests.support.runs.run import Run, train
from tests.support.runs.whole_runs import (
    JOURNAL_S,
    assert_same_run,
    check_counters,
    config_of,
    contents_of,
    holds_finished_groups,
    kill_everything,
    metric_steps,
    repeatable,
    start_run,
    wait_for,
)

pytestmark = pytest.mark.engine

BEST = "eval/heldout/greedy"
ENDS = ("trained", "filtered", "dropped_stale", "failed")


def test_killed_and_resumed_equals_unbroken(tmp_path: Path) -> None:
    """kill -9 of every process after 4 steps, back to the checkpoint of step 2, 2 steps again: the same, bit for bit.

    The resumed run also removes the sockets and temporary files of the killed one. The first run is the unbroken one,
    up to its last checkpoint. (`slow`: killed in the middle, against a third run.)
    """
    config = config_of(tmp_path)
    run_dir = tmp_path / "run"
    process = start_run(config)
    directory = CheckpointDirectory(run_dir / "checkpoints")
    try:
        wait_for(lambda: metric_steps(run_dir) == 4 and directory.steps() == [2, 4], process)
        private = Path((read_state(run_dir) or {})["private_directory"])
    finally:
        kill_everything(process, run_dir)
    assert any(private.iterdir()), "nothing is left that could be swept"
    batches = [read_batch(run_dir / "batches", step) for step in range(4)]
    later = directory.set_aside(4, "unbroken")
    resumed = train(config)
    assert resumed.code == 0, resumed.output[-4000:]
    assert "2 steps done" in resumed.output
    check_counters(resumed, 4)
    assert [read_batch(run_dir / "batches", step) for step in range(4)] == batches
    assert contents_of(directory.path(4)) == contents_of(later)
    moved = [json.loads(line) for line in (run_dir / "rolled_back.jsonl").read_text().splitlines()]
    for name in ("metrics.jsonl", "samples.jsonl"):
        lines = [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
        was = [repeatable(line) for line in moved if line["file"] == name]
        assert was and [repeatable(line) for line in lines if line["step"] > 2][: len(was)] == was
    summary = resumed.summary
    assert summary["steps"] == 4 and summary["groups_rolled_back"] == 8 and summary["eval_before"]["n"] == 8
    assert summary["wall_seconds"] > sum(record["time/step"] for record in resumed.metrics)
    check_events(run_dir)
    assert_nothing_left(run_dir)
    assert of_private_directory(private) == []


def check_events(run_dir: Path) -> None:
    """The steps 3 and 4 of the killed run are marked as rolled back, and nothing else is."""
    steps = [(each.step, each.rolled_back) for each in read_events(run_dir, {"step"}) if each.process.endswith("-0")]
    assert sorted(step for step, rolled_back in steps if not rolled_back) == [1, 2, 3, 4]
    assert {step for step, rolled_back in steps if rolled_back} in ({3}, {3, 4})  # the last second may be lost
    saves = {(each.step, each.rolled_back) for each in read_events(run_dir, {"checkpoint"})}
    assert {(2, False), (4, False)} <= saves <= {(2, False), (4, False), (4, True)}
    (mark,) = read_events(run_dir, {"rolled_back"})
    assert mark.step == 2 and float(mark.args["since"]) < mark.begin


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_in_the_middle_equals_a_run_of_its_own(tmp_path: Path, precision: str) -> None:
    """A run of 4 steps ends in the same state as one that is killed by SIGKILL in its third step and resumed.

    Both keep their best checkpoint alongside the newest one.
    """
    kept = {"every": 1, "keep_last": 1, "keep_best": BEST}
    changes: dict[str, Any] = {"trainer": {"precision": precision}, "checkpoint": kept}
    unbroken = train(config_of(tmp_path / "unbroken", **changes))
    assert unbroken.code == 0, unbroken.output[-4000:]
    config = config_of(tmp_path / "killed", tmp_path / "unbroken" / "model", **changes)
    run_dir = tmp_path / "killed" / "run"
    process = start_run(config)
    try:
        wait_for(lambda: metric_steps(run_dir) >= 2 and CheckpointDirectory(run_dir / "checkpoints").steps(), process)
        time.sleep(0.5)
    finally:
        kill_everything(process, run_dir)
    resumed = train(config)
    assert resumed.code == 0, resumed.output[-4000:]
    check_counters(resumed, 4)
    assert_same_run(unbroken, resumed)
    assert resumed.summary["eval_before"] == unbroken.summary["eval_before"]
    for run in (unbroken, resumed):
        check_the_best_is_kept(run)
    assert_nothing_left(run_dir)


def check_the_best_is_kept(run: Run) -> None:
    """The value of the evaluation is in the checkpoint, and decides which one stays alongside the newest.

    The last step is saved before it is evaluated, and compared nevertheless.
    """
    lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    evaluated = {line["eval/step"]: line[BEST] for line in lines if BEST in line}
    directory = CheckpointDirectory(run.directory / "checkpoints")
    best = max((1, 2, 3, 4), key=lambda step: evaluated[step])
    assert directory.steps() == sorted({best, 4}), evaluated
    assert {step: directory.metrics(step)[BEST] for step in directory.steps()} == {
        step: evaluated[step] for step in (best, 4)
    }


STEPS_AHEAD = 20


@pytest.mark.slow
def test_finished_groups_survive_the_death_of_every_process(tmp_path: Path) -> None:
    """Generation runs ahead; after SIGKILL the run goes on from its journal, and every group ends once."""
    changes = {
        "run": {"deterministic": False},
        "admission": {"mode": "async", "sync_interval": 1, "max_staleness": 3},
        "rollout": {"journal_s": JOURNAL_S},
        "checkpoint": {"every": 2},
    }
    config = config_of(tmp_path, steps=STEPS_AHEAD, **changes)
    run_dir, groups = tmp_path / "run", config["batch"]["groups"]
    process = start_run(config)
    try:
        wait_for(lambda: metric_steps(run_dir) >= 3 and holds_finished_groups(run_dir, groups), process)
    finally:
        kill_everything(process, run_dir)
    resumed = train(config)
    assert resumed.code == 0, resumed.output[-4000:]
    assert [record["step"] for record in resumed.metrics] == list(range(1, STEPS_AHEAD + 1))
    totals = {name: resumed.metrics[-1][f"total/groups_{name}"] for name in ENDS}
    assert sum(totals.values()) == STEPS_AHEAD * config["batch"]["groups"]
    assert sum(record["rollout/groups_kept"] for record in resumed.metrics) > 0
    trained = [
        row.group_id for step in range(STEPS_AHEAD) for row in read_batch(run_dir / "batches", step).trajectories
    ]
    assert set(Counter(trained).values()) == {config["batch"]["samples_per_group"]}, "a group is in two batches"
    assert len(set(trained)) == STEPS_AHEAD * config["batch"]["groups"]
    assert all(record["batch/staleness_max"] <= 3 for record in resumed.metrics)
    assert_nothing_left(run_dir)


@pytest.mark.slow
def test_no_call_of_a_tool_is_made_again_after_the_death_of_every_process(tmp_path: Path) -> None:
    """The tool agent, in the middle of calls that must not be repeated; SIGKILL, and the run goes on from its journal.

    The tool takes so long that some calls are open at any moment. Every call is a line with a name of its own.
    """
    notes, run_dir, steps = tmp_path / "calls", tmp_path / "run", 4
    changes: dict[str, Any] = {
        "run": {"deterministic": False},
        "admission": {"mode": "async", "sync_interval": 1, "max_staleness": 1},  # so that groups begin at each version
        "rollout": {"journal_s": 5.0},  # only what is written before a call is newer
        "agent": {"loop": "tests.support.agents.noted_calls:NotedToolAgent", "tool_format": "hermes"},
        "sampling": {"max_tokens": 256},
        "checkpoint": {"every": 1},
    }
    config = config_of(tmp_path, steps=steps, **changes)
    config["evaluation"], config["trainer"]["micro_batch_tokens"] = {}, 1024
    tool = "tests.support.agents.noted_calls:NotedCalls"
    config["tools"] = [{"kind": tool, "kwargs": {"path": str(notes), "seconds": 2.0}}]
    problems = [json.loads(line)["problem"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    teach_calls(tmp_path / "model", problems)
    process = start_run(config)
    try:
        wait_for(lambda: bool(CheckpointDirectory(run_dir / "checkpoints").steps()), process)
        before = len(notes.read_text().splitlines())
        wait_for(lambda: len(notes.read_text().splitlines()) > before, process)
    finally:
        kill_everything(process, run_dir)
    before = len(notes.read_text().splitlines())
    resumed = train(config)
    assert resumed.code == 0, resumed.output[-4000:]
    logs = "".join(path.read_text() for path in (run_dir / "logs").glob("controller*.log"))
    assert "are drawn again" not in logs, "the calls of these groups would be made again"
    assert int(re.findall(r"and (\d+) unfinished ones continue", logs)[-1]) > 0
    calls = notes.read_text().splitlines()
    assert len(calls) > before > 0 and max(Counter(calls).values()) == 1, Counter(calls).most_common(3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    batches = [read_batch(run_dir / "batches", step).trajectories for step in range(steps)]
    texts = [tokenizer.decode(row.response_ids) for rows in batches for row in rows]
    assert sum(INTERRUPTED in text for text in texts) >= 1, "no call was open when the processes were killed"
    assert_nothing_left(run_dir)


@pytest.mark.slow
def test_a_curriculum_goes_on_where_it_was(tmp_path: Path) -> None:
    """kill -9 of every process after 4 steps, back to the checkpoint of step 2: the same prompts of the same sets.

    The first run is the undisturbed one. Its weights depend on every reward so far.
    """
    sets = [{"name": name, "path": str(tmp_path / f"{name}.jsonl")} for name in ("first", "second")]
    notes = tmp_path / "notes.jsonl"
    curriculum = {"function": "tests.support.agents.curricula:noted_by_rewards", "kwargs": {"notes": str(notes)}}
    data = {"path": None, "sets": sets, "curriculum": curriculum}
    config = config_of(tmp_path, data=data, evaluation={"every": 4})
    problems = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    for number, each in enumerate(sets):
        Path(each["path"]).write_text("".join(problems[number::2]))
    run_dir = tmp_path / "run"
    directory = CheckpointDirectory(run_dir / "checkpoints")
    process = start_run(config)
    try:
        wait_for(lambda: metric_steps(run_dir) == 4 and directory.steps() == [2, 4], process)
    finally:
        kill_everything(process, run_dir)
    drawn, weights = prompts_by_step(run_dir, 4), weights_by_step(notes)
    directory.set_aside(4, "undisturbed")
    notes.unlink()
    resumed = train(config)
    assert resumed.code == 0, resumed.output[-4000:]
    assert "2 steps done" in resumed.output
    assert prompts_by_step(run_dir, 4) == drawn
    assert {name for step in drawn for name, _ in step.values()} == {"first", "second"}
    assert len(set(map(str, weights.values()))) == len(weights) == 5, "the weights did not follow the rewards"
    again = weights_by_step(notes)
    assert set(again) == {0, 3, 4} and all(again[step] == weights[step] for step in again)
    assert_nothing_left(run_dir)


def prompts_by_step(run_dir: Path, steps: int) -> list[dict[int, tuple[str, list[int]]]]:
    """The set and the prompt of each group of each step."""
    batches = [read_batch(run_dir / "batches", step) for step in range(steps)]
    return [{row.group_id: (row.dataset, row.prompt_ids) for row in batch.trajectories} for batch in batches]


def weights_by_step(notes: Path) -> dict[int, dict[str, float]]:
    """The weights that the curriculum has returned, by the steps done."""
    return dict(json.loads(line) for line in notes.read_text().splitlines())
