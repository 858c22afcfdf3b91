"""Parts of the rollout pool are killed, or hang, under a training run, which goes on and ends well."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.cluster.handle import read_state
from tests.support.leftovers import assert_nothing_left
from tests.support.run import Run, step_records
from tests.support.whole_runs import (
    check_counters,
    check_every_group_once,
    config_of,
    kill_everything,
    metric_steps,
    start_run,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def actors(run_dir: Path, name: str) -> list[psutil.Process]:
    """The processes of Ray actors of a class."""
    supervisor = psutil.Process(json.loads((run_dir / "supervisor.json").read_text())["process"]["pid"])
    return [each for each in supervisor.children(recursive=True) if f"ray::{name}" in " ".join(each.cmdline())]


def attempt(run_dir: Path) -> int:
    return int((read_state(run_dir) or {"attempt": -1})["attempt"])


def test_a_dead_queue_and_a_dead_controller_cost_one_restart_of_the_ranks_each(tmp_path: Path) -> None:
    """The ranks restart at once, and must not attach to the pool that is about to end."""
    config = config_of(tmp_path, steps=400, checkpoint={"every": 2})
    config["evaluation"] = {}
    run_dir, process = tmp_path / "run", start_run(config, restarts=2)
    saved = CheckpointDirectory(run_dir / "checkpoints")
    try:
        for number, victim in enumerate(("SimpleStorageUnit", "RolloutController")):
            before = max(saved.steps(), default=0)
            wait_for(lambda before=before: max(saved.steps(), default=0) > before, process)  # type: ignore[misc]
            [found, *_] = actors(run_dir, victim)
            found.kill()
            wait_for(lambda number=number: attempt(run_dir) == number + 1, process)  # type: ignore[misc]
        before = max(saved.steps(), default=0)
        wait_for(lambda: max(saved.steps(), default=0) > before, process)
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill_everything(process, run_dir)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0 and run.summary["exit"] == "preempted", output[-4000:]
    check_counters(run, metric_steps(run_dir))
    reasons = "".join(path.read_text() for path in (run_dir / "logs").glob("supervisor.log"))
    assert "of the trajectory queue has died" in reasons and "the rollout controller does not answer" in reasons
    assert_nothing_left(run_dir)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_only_engine_hangs_and_is_replaced_without_a_restart_of_the_ranks(tmp_path: Path, mode: str) -> None:
    """SIGSTOP while it generates: nothing but its silence tells, and no other engine can go on."""
    config = config_of(tmp_path, steps=400, checkpoint={"every": 2}, timeouts={"rpc_s": 15})
    config["run"]["deterministic"], config["evaluation"], config["admission"] = False, {}, {"mode": mode}
    config["sampling"]["max_tokens"] = 48
    run_dir, process = tmp_path / "run", start_run(config)
    try:
        wait_for(lambda: metric_steps(run_dir) >= 2, process)
        [engine] = actors(run_dir, "EngineReplica")
        engine.suspend()
        wait_for(lambda: restarted(run_dir) > 0, process)
        done = metric_steps(run_dir)
        wait_for(lambda: metric_steps(run_dir) > done + 1, process)
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill_everything(process, run_dir)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0 and run.summary["exit"] == "preempted", output[-4000:]
    check_every_group_once(run, metric_steps(run_dir))
    assert attempt(run_dir) == 0 and not engine.is_running()
    assert_nothing_left(run_dir)


def restarted(run_dir: Path) -> int:
    return int(sum(record.get("sync/restarted_replicas", 0) for record in step_records(run_dir)))
