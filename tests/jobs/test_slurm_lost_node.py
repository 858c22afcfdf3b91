"""Two jobs at once on a real SLURM, one of which loses a node."""

import re
from pathlib import Path

import pytest

from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.jobs import FOUR_HOSTS, TWO_HOSTS, check_steps, exit_record, wait_for, write_job
from tests.support.runs.run import step_records
from tests.support.runs.slurm import Slurm, submit

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LIMIT = {"stop_before_s": 60, "time_limit": "00:40:00"}


def resumed_steps(log: Path, run_dir: Path) -> list[int]:
    """The numbers of the steps from whose checkpoints the job has resumed, in their order."""
    text = log.read_text()
    found = re.findall(rf"resuming from {re.escape(str(run_dir))}/checkpoints/iter_0*(\d+), (\d+) steps done", text)
    assert all(name == steps for name, steps in found), found
    return [int(steps) for _, steps in found]


def test_a_job_whose_node_fails_is_queued_again_and_resumes_while_another_one_is_left_alone(
    slurm: Slurm, tmp_path: Path
) -> None:
    """SLURM hears that a node has failed: it ends what is left of the job on the others, and queues it again.

    The other job, on two nodes of its own, has begun meanwhile and runs to its end.
    """
    long = write_job(tmp_path / "long", steps=100_000, launch=LIMIT, checkpoint={"every": 2}, **FOUR_HOSTS)
    short = write_job(tmp_path / "short", steps=4, launch=LIMIT, **TWO_HOSTS)
    run_dir, other_dir = long.parent / "run", short.parent / "run"
    job, log = submit(slurm, long)
    other, other_log = submit(slurm, short)
    saved = run_dir / "checkpoints"
    wait_for(lambda: any(saved.glob("iter_*/manifest.json")), 400, "a checkpoint", log)
    slurm.run("scontrol", "update", f"NodeName={slurm.nodes_of(job)[-1]}", "State=DOWN", "Reason=test")
    wait_for(lambda: len(resumed_steps(log, run_dir)) == 1, 300, "the job to resume", log)
    [done] = resumed_steps(log, run_dir)
    wait_for(lambda: len(step_records(run_dir)) >= done + 2, 600, "two further steps", log)
    check_steps(run_dir)
    slurm.run("scancel", job)
    assert slurm.wait(job, {"CANCELLED"}, 90, log) == "CANCELLED"
    assert_nothing_left(run_dir, within_s=40)
    assert slurm.wait(other, {"COMPLETED", "FAILED", "CANCELLED"}, 300, other_log) == "COMPLETED", other_log.read_text()
    assert exit_record(other_dir)["status"] == "finished"
    check_steps(other_dir, 4)
    assert resumed_steps(other_log, other_dir) == []
    assert_nothing_left(other_dir)
