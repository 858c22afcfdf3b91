"""Parts of the rollout pool are killed, or hang, under a training run, which goes on and ends well.

MEGARL_FAULT_SEED=N repeats the moments, as far as the machine is as fast.
"""

import time
from pathlib import Path

import pytest

from benchmarks.lib.chaos import version_being_published
from megarl.cluster.pool.pool_process import read_state
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from tests.support.machines.schedule_replay import read_schedule, replay_schedule
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.fault_table import moments
from tests.support.runs.run import Run, step_records
from tests.support.runs.whole_runs import (
    actors,
    check_counters,
    check_engine_bound,
    check_every_group_once,
    config_of,
    first_engine,
    killed_after,
    metric_steps,
    ranks_of,
    start_run,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RPC_S = 15


def attempt(run_dir: Path) -> int:
    return int((read_state(run_dir) or {"attempt": -1})["attempt"])


def rebuilds(run_dir: Path) -> int:
    """The number of times that the pool has started controller and queue again; -1 while it does."""
    state = read_state(run_dir) or {}
    return int(state.get("rebuilds", 0)) if state.get("state") == "ready" else -1


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_dead_queue_and_a_dead_controller_are_rebuilt_under_the_living_ranks(tmp_path: Path, mode: str) -> None:
    """No restart of the ranks is allowed. The supervisor, the engine and all ranks are those of the start."""
    config = config_of(tmp_path, steps=400, checkpoint={"every": 2}, timeouts={"rpc_s": RPC_S})
    config["evaluation"], config["admission"] = {}, {"mode": mode}
    config["run"]["deterministic"] = mode == "sync"
    rng = moments()
    run_dir, process = tmp_path / "run", start_run(config)
    with killed_after(process, run_dir):
        wait_for(lambda: metric_steps(run_dir) >= 2, process)
        [engine], ranks = actors(run_dir, "EngineReplica"), ranks_of(process)
        deaths = (("SimpleStorageUnit", "kill"), ("RolloutController", "kill"), ("RolloutController", "suspend"))
        for number, (victim, death) in enumerate(deaths, start=1):
            time.sleep(rng.uniform(0.0, 2.0))
            [found, *_] = actors(run_dir, victim)
            getattr(found, death)()
            wait_for(lambda number=number: rebuilds(run_dir) == number, process)  # type: ignore[misc]
            assert not found.is_running(), "a controller that hangs must not wake up alongside the new one"
            done = metric_steps(run_dir)
            wait_for(lambda done=done: metric_steps(run_dir) > done + 2, process)  # type: ignore[misc]
        assert engine.is_running() and all(rank.is_running() for rank in ranks)
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=600)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0 and run.summary["exit"] == "preempted", output[-4000:]
    steps = metric_steps(run_dir)
    check_every_group_once(run, steps)
    if mode == "sync":
        check_counters(run, steps)
    assert attempt(run_dir) == 0 and run.metrics[-1]["rollout/rebuilds"] == 3
    replayed = replay_schedule(read_schedule(run_dir / SCHEDULE_FILE))
    assert sorted(replayed)[:steps] == list(range(steps)), "a new controller goes on with the batches in hand"
    for reason in ("of the trajectory queue has died", "the rollout controller does not answer"):
        assert f"{reason}" in output, "the user is notified"
    assert_nothing_left(run_dir)


@pytest.mark.parametrize(
    ("mode", "death"), [("sync", "suspend"), ("async", "suspend"), ("sync", "kill"), ("async", "kill")]
)
def test_the_only_engine_is_lost_and_replaced_without_a_restart_of_the_ranks(
    tmp_path: Path, mode: str, death: str
) -> None:
    """SIGSTOP while it generates, so that nothing but its silence tells, or SIGKILL in a publication of the weights."""
    config = config_of(tmp_path, steps=400, checkpoint={"every": 2}, timeouts={"rpc_s": RPC_S})
    config["telemetry"] = {"dump_batches": True}  # the schedule tells when a version is published
    config["run"]["deterministic"], config["evaluation"], config["admission"] = False, {}, {"mode": mode}
    config["sampling"]["max_tokens"] = 48
    rng = moments()
    run_dir, process = tmp_path / "run", start_run(config)
    with killed_after(process, run_dir):
        wait_for(lambda: metric_steps(run_dir) >= 2, process)
        time.sleep(rng.uniform(0.0, 2.0))
        engine, start_s = first_engine(run_dir)
        if death == "kill":
            deadline = time.monotonic() + 60.0
            while version_being_published(run_dir) is None:  # it takes some hundredths of a second
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.002)
        lost_at, since = time.time(), metric_steps(run_dir)
        getattr(engine, death)()
        wait_for(lambda: restarted(run_dir) > 0, process)
        done = metric_steps(run_dir)
        wait_for(lambda: metric_steps(run_dir) > done + 1, process)
        check_engine_bound(run_dir, start_s, lost_at, since, RPC_S)
        (run_dir / "stop").touch()
        output, _ = process.communicate(timeout=600)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0 and run.summary["exit"] == "preempted", output[-4000:]
    check_every_group_once(run, metric_steps(run_dir))
    assert attempt(run_dir) == 0 and not engine.is_running()
    assert_nothing_left(run_dir)


def restarted(run_dir: Path) -> int:
    return int(sum(record.get("sync/restarted_replicas", 0) for record in step_records(run_dir)))
