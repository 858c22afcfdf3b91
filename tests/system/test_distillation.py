"""Whole runs of on-policy distillation: a student that learns nothing but how its teacher scores its own tokens."""

from pathlib import Path
from typing import Any

import pytest

from megarl.queue.dump import read_batch
from megarl.queue.streams import TEACHER_LOGPROBS
from tests.support.attacks.open_sockets import check_on_loopback
from tests.support.models.digit_teacher import make_digit_teacher
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import Run, step_records, tiny_config, train
from tests.support.runs.whole_runs import actors, check_every_group_once, killed_after, start_run, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 10


def distilled(directory: Path, teacher: Path, scored_by: str = "engine", **distill: Any) -> dict[str, Any]:
    """The reward is the share of digits. It is measured, and trains nothing."""
    config = tiny_config(directory, steps=STEPS)
    config["data"]["max_prompt_tokens"] = 64
    config["data"]["teacher"] = "digits"
    config["teachers"] = [{"name": "digits", "path": str(teacher), "where": scored_by}]
    config["algorithm"] = {"distill": distill}
    config["trainer"]["optimizer"] = {"lr": 1e-2}
    config["telemetry"] = {"dump_batches": True}
    return config


def check_learnt(run: Run) -> None:
    assert run.code == 0, run.output[-4000:]
    check_every_group_once(run, STEPS)
    records = run.metrics
    kl = [record["policy/teacher_kl"] for record in records]
    assert kl[0] > 1 and kl[-1] < 0.3 * kl[0], kl
    assert all(record["groups/filtered"] == 0 for record in records), "equal rewards are no reason to drop a group"
    summary = run.summary
    assert summary["eval_after"]["sampled"] > summary["eval_before"]["sampled"] + 0.4, summary


def test_a_student_learns_from_a_teacher_with_an_engine_of_its_own(tmp_path: Path) -> None:
    run_dir, process = tmp_path / "run", start_run(distilled(tmp_path, make_digit_teacher(tmp_path / "teacher")))
    with killed_after(process, run_dir):
        wait_for(lambda: len(step_records(run_dir)) >= 1, process)
        check_on_loopback(run_dir, "ray::TeacherEngine", "train_rl.py")
        output, _ = process.communicate(timeout=400)
    run = Run(process.returncode, output, run_dir)
    check_learnt(run)
    assert all(record["rollout/teacher_seconds_mean"] > 0 for record in run.metrics)
    rows = read_batch(run.directory / "batches", 0).trajectories
    assert all(len(row.streams[TEACHER_LOGPROBS]) == len(row.response_ids) for row in rows)
    assert_nothing_left(run.directory)


def test_a_student_learns_from_a_teacher_that_the_trainer_holds_by_a_term_of_the_loss(tmp_path: Path) -> None:
    """Two pipeline stages; the passes are made while the trainer waits."""
    config = distilled(tmp_path, make_digit_teacher(tmp_path / "teacher"), "trainer", where="loss")
    config["trainer"]["parallel"] = {"pipeline": 2}
    run = train(config)
    check_learnt(run)
    assert not any("rollout/teacher_seconds_mean" in record for record in run.metrics)


def test_a_student_that_is_its_own_teacher_learns_nothing(tmp_path: Path) -> None:
    """And the first step shows that the teacher's engine, the pool's and the trainer compute the same."""
    run = train(distilled(tmp_path, tmp_path / "model"))
    assert run.code == 0, run.output[-4000:]
    assert abs(run.metrics[0]["policy/teacher_kl"]) < 1e-4
    summary = run.summary
    assert summary["eval_after"]["sampled"] < summary["eval_before"]["sampled"] + 0.2, summary


def test_a_teachers_engine_that_dies_is_started_again_and_every_group_counts_once(tmp_path: Path) -> None:
    """It is on the GPU of the policy's engine, as far as a CPU can have that: it starts after that one."""
    config = distilled(tmp_path, make_digit_teacher(tmp_path / "teacher"))
    config["teachers"][0] |= {"gpu_share": 0.5, "gpu_memory_utilization": 0.4}
    config["rollout"]["gpu_memory_utilization"] = 0.5
    run_dir, process = tmp_path / "run", start_run(config)
    try:
        wait_for(lambda: len(step_records(run_dir)) >= 2, process)
        (engine,) = actors(run_dir, "TeacherEngine")
        engine.kill()
        output, _ = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    run = Run(process.returncode, output, run_dir)
    check_learnt(run)
    assert "teacher digits, engine 0" in (run_dir / "logs" / "controller.log").read_text()
    assert_nothing_left(run_dir)
