"""Killed in the middle of saves, and at random: nothing is lost beyond the last complete checkpoint.

The trainer's ranks are killed and restarted by torchrun, with supervisor, Ray, queue and engines kept; or all of it.
"""

import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.cluster.pool.pool_process import read_state
from tests.support.checkpoints.kill_points import POINTS
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, train
from tests.support.runs.whole_runs import (
    assert_same_run,
    check_counters,
    config_of,
    kill_everything,
    metric_steps,
    ranks_of,
    start_run,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 12
KILLED_ENTRY = ("-m", "tests.support.checkpoints.kill_points")
KILLS = 10


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = train(config_of(tmp_path_factory.mktemp("unbroken"), steps=STEPS, checkpoint={"every": 1}))
    assert run.code == 0, run.output[-4000:]
    check_counters(run, STEPS)
    return run


def finish(process: Any, run_dir: Path, timeout_s: float = 400.0) -> Run:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_everything(process, run_dir)
        raise
    return Run(process.returncode, output, run_dir)


def test_every_fault_point_of_a_save(unbroken: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one run the trainer is killed once at each point, and the pool is kept. It ends as the unbroken run."""
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("KILL_AT", ",".join(POINTS))
    monkeypatch.setenv("KILL_MARKS", str(marks))
    # `never` holds for the first start only: the restarts resume.
    wanted = {"every": 1, "resume": "never"}
    config = config_of(tmp_path, unbroken.directory.parent / "model", steps=STEPS, checkpoint=wanted)
    process = start_run(config, restarts=len(POINTS), script=KILLED_ENTRY)
    run = finish(process, tmp_path / "run")
    assert run.code == 0, run.output[-6000:]
    assert sorted(path.name for path in marks.iterdir()) == sorted(POINTS)
    state = read_state(run.directory)
    assert state is not None and state["attempt"] == 0  # one pool for all six attempts
    check_counters(run, STEPS)
    assert_same_run(unbroken, run)
    assert run.summary["groups_rolled_back"] >= len(POINTS) * 4
    assert "resuming from" in run.output
    assert not [
        path for path in (run.directory / "checkpoints").iterdir() if path.name.endswith((".partial", ".deleted"))
    ]
    assert_nothing_left(run.directory)


@pytest.mark.parametrize("seed", [0])
def test_random_kills(unbroken: Run, tmp_path: Path, seed: int) -> None:
    """Ten seeded random kills: eight of one rank with the pool kept, two of everything.

    Kill number k comes after a random time, at the latest soon after step k + 1: the run cannot end before the last.
    """
    rng = random.Random(seed)
    everything = set(rng.sample(range(KILLS), 2))
    config = config_of(tmp_path, unbroken.directory.parent / "model", steps=STEPS, checkpoint={"every": 1})
    run_dir = tmp_path / "run"
    directory = CheckpointDirectory(run_dir / "checkpoints")
    process = start_run(config, restarts=KILLS)
    for number in range(KILLS):
        # Near the things that can go wrong: from the start of the ranks into the save and the step after the next one.
        until = time.monotonic() + rng.uniform(1.0, 25.0)
        wait_for(lambda: time.monotonic() > until or metric_steps(run_dir) > number, process)
        time.sleep(rng.uniform(0.0, 0.5))
        wait_for(lambda: bool(ranks_of(process)), process)
        kept = directory.steps()
        if number in everything:
            kill_everything(process, run_dir)
            assert directory.steps()[-1:] >= kept[-1:]
            process = start_run(config, restarts=KILLS)
        else:
            rng.choice(ranks_of(process)).kill()
    run = finish(process, run_dir)
    assert run.code == 0, run.output[-6000:]
    check_counters(run, STEPS)
    assert_same_run(unbroken, run)
    assert_nothing_left(run_dir)


def test_a_changed_learning_rate_is_taken_and_a_damaged_checkpoint_is_not(unbroken: Run, tmp_path: Path) -> None:
    """The copy resumed from has a flipped byte in its newest checkpoint, another learning rate and one rank less."""
    config = config_of(tmp_path, unbroken.directory.parent / "model", steps=STEPS, checkpoint={"every": 1})
    config["trainer"] |= {"gpus": 1, "optimizer": {"lr": 5e-4}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    shutil.copytree(unbroken.directory, tmp_path / "run")
    (tmp_path / "run" / "exit.json").unlink()  # as if it had been killed after its last save; else it has finished
    shard = next((tmp_path / "run" / "checkpoints" / f"iter_{STEPS:07d}").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    run = train(config, ranks=1)
    assert run.code == 0, run.output[-4000:]
    assert f"{shard.name}: digest" in run.output and f"{STEPS - 1} steps done" in run.output
    assert "trainer.optimizer.lr: 0.001 -> 0.0005" in run.output and "trainer.gpus: 2 -> 1" in run.output
    assert run.metrics[-1]["policy/lr"] == 5e-4 and len(run.metrics) == STEPS
