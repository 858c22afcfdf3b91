"""Jobs on a real SLURM of six virtual nodes, submitted as a user does it: with the rendered batch script."""

import json
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.pool.leftovers import assert_nothing_left, marked
from tests.support.runs.jobs import FOUR_HOSTS, check_steps, exit_record, wait_for, write_job
from tests.support.runs.run import step_records
from tests.support.runs.slurm import Slurm, submit

pytestmark = pytest.mark.cluster

# Seconds: what one save of the tiny model and the rest of its step may take.
STOP_S = 75  # more than timeouts.save_s


def test_an_allocation_that_does_not_fit_starts_nothing(slurm: Slurm, tmp_path: Path) -> None:
    config = write_job(tmp_path, steps=4, **FOUR_HOSTS)
    job, log = submit(slurm, config, "--nodes=3", "--time=00:05:00")
    assert slurm.wait(job, {"FAILED", "COMPLETED"}, 120, log) == "FAILED"
    said = log.read_text()
    assert "megarl: 2 problems" in said and "Traceback" not in said
    assert "nodes: the job has 3 (n1, n2, n3), the config needs 4 (2 trainer, 2 rollout); ask for --nodes=4" in said
    assert "it would stop before its first step" in said  # 30 s for a save and 300 s for a step do not fit into it
    assert not (tmp_path / "run").exists()


def test_a_recipes_script_is_submitted_from_the_checkout(slurm: Slurm, tmp_path: Path) -> None:
    """Unchanged but for its config and its GPUs, which this SLURM does not have. The allocation does not fit."""
    recipe, config = "qwen3_8b_gsm8k_8", write_job(tmp_path, steps=4, **FOUR_HOSTS)
    text = (ROOT / f"launch/slurm/{recipe}.sbatch").read_text()
    named, gpus = f"config=examples/rl/configs/{recipe}.yaml", "#SBATCH --gpus-per-node=8\n"
    assert named in text and gpus in text
    script, log = tmp_path / "recipe.sbatch", tmp_path / "job.log"
    script.write_text(text.replace(named, f"config={config}").replace(gpus, ""))
    options = ("--parsable", f"--output={log}", "--nodes=3", "--time=00:05:00")
    job = slurm.run("sbatch", *options, str(script), cwd=ROOT, **marked(tmp_path / "run"))
    assert slurm.wait(job, {"FAILED", "COMPLETED"}, 120, log) == "FAILED"
    assert "nodes: the job has 3 (n1, n2, n3), the config needs 4" in log.read_text()
    assert not (tmp_path / "run").exists()


def test_a_job_runs_to_its_end(slurm: Slurm, tmp_path: Path) -> None:
    """The shipped script for any config starts it; nodes and time are given with it."""
    config = write_job(tmp_path, steps=4, launch={"stop_before_s": STOP_S}, **FOUR_HOSTS)
    script, log = ROOT / "launch/slurm/train.sbatch", tmp_path / "job.log"
    options = ("--parsable", f"--output={log}", "--nodes=4", "--time=00:40:00")
    environment = marked(tmp_path / "run")
    job = slurm.run("sbatch", *options, str(script), str(config), cwd=ROOT, **environment)
    assert slurm.wait(job, {"COMPLETED", "FAILED", "CANCELLED"}, 400, log) == "COMPLETED", log.read_text()
    run_dir = tmp_path / "run"
    assert exit_record(run_dir)["status"] == "finished" and "finished after 4 of 4 steps" in log.read_text()
    check_steps(run_dir, 4)
    logs = {path.name for path in (run_dir / "logs").iterdir()}
    assert {f"node-{i}.log" for i in range(4)} | {"trainer-rank-0.log", "trainer-rank-1.log"} <= logs
    assert {"replica-0.log", "replica-1.log", "supervisor.log", "controller.log"} <= logs
    # Nodes 0 and 1 are the trainer's, 2 has the Ray head; only node 3 joins with an engine.
    joined = {i: (run_dir / f"logs/raylet-node-{i}.log").read_text() for i in (0, 1, 3)}
    assert all("num_cpus=0, num_gpus=0, resources={}" in joined[i] for i in (0, 1))
    assert "'megarl_engine': 1" in joined[3]
    assert_nothing_left(run_dir)


@pytest.mark.slow
def test_time_limit_requeue_resume_and_cancel(slurm: Slurm, tmp_path: Path) -> None:
    """SLURM's own timer stops the job, which saves, is queued again and goes on; then scancel, and nothing is left."""
    config = write_job(
        tmp_path, steps=100_000, launch={"stop_before_s": STOP_S, "time_limit": "00:04:00"}, **FOUR_HOSTS
    )
    job, log = submit(slurm, config)
    run_dir = tmp_path / "run"
    wait_for(lambda: exit_record(run_dir).get("status") is not None, 320, "the time limit", log)
    stopped = exit_record(run_dir)
    assert stopped["status"] == "preempted" and "time limit" in stopped["reason"] and stopped["step"] > 0, stopped
    done = stopped["step"]
    wait_for(lambda: len(step_records(run_dir)) >= done + 2, 260, "two steps after the requeue", log)
    text = log.read_text()
    assert "queued again" in text
    assert f"resuming from {run_dir}/checkpoints/iter_{done:07d}, {done} steps done" in text
    assert not (run_dir / "previous").exists()
    check_steps(run_dir)
    assert json.loads((run_dir / "launch" / f"{job}-1" / "launch.json").read_text())["steps_before"] == done
    slurm.run("scancel", job)
    assert slurm.wait(job, {"CANCELLED"}, 90, log) == "CANCELLED"
    assert_nothing_left(run_dir, within_s=40)
