"""Ctrl-C of the commands `eval` and `replay`: one message, no traceback, nothing left; a second one changes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli.standalone import ANY_STOP, interrupted_once
from megarl.common.rundir.run_lock import CLAIM_FILE
from megarl.config.loading.load import to_yaml
from megarl.queue.dump import write_batch
from tests.support.checkout import ROOT, environment
from tests.support.losses.rl_problem import make_config
from tests.support.models.tensors import differing, read_hf
from tests.support.models.tiny import make_tiny_model
from tests.support.pool.leftovers import assert_nothing_left
from tests.support.runs.run import popen
from tests.support.trainer.recorded_steps import GROUPS, SAMPLES, UPDATES, make_batch, version_of
from tests.support.waiting import wait_until

STEPS = 100  # that take far longer than it takes to interrupt them
ENDS_S = 60.0


@pytest.mark.parametrize("number", ANY_STOP)
def test_the_first_signal_ends_the_work_and_none_the_tear_down(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in ANY_STOP]
    torn_down = False
    with pytest.raises(KeyboardInterrupt), interrupted_once(ANY_STOP):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
            pytest.fail("the work went on")
        finally:
            for each in ANY_STOP:
                os.kill(os.getpid(), each)
            time.sleep(0.01)
            torn_down = True
    assert torn_down and [signal.getsignal(each) for each in ANY_STOP] == before


def interrupted(process: subprocess.Popen[str], when: Callable[[], bool]) -> str:
    """Press Ctrl-C twice; return what the command has written. It ends in time, with the status of an interrupt."""
    try:
        wait_until(lambda: when() or process.poll() is not None, 500, "the moment of the Ctrl-C")
        assert process.poll() is None, process.communicate()[0]
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=ENDS_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert output.count("megarl: interrupted") == 1 and "Traceback" not in output, output
    return output


@pytest.mark.slow
def test_a_replay_that_is_interrupted(tmp_path: Path) -> None:
    config = make_config(
        make_tiny_model(tmp_path / "model"), run__dir=tmp_path / "run", run__steps=STEPS, batch__groups=GROUPS,
        batch__samples_per_group=SAMPLES, algorithm__kl__coef=0.0, trainer__mini_batches=UPDATES,
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    for step in range(STEPS):
        write_batch(tmp_path / "run" / "batches", step, version_of(step), make_batch(step))
    out = tmp_path / "again"
    command = [sys.executable, "-m", "megarl", "replay", "--run-dir", str(tmp_path / "run"), "--out", str(out)]
    metrics = out / "metrics.jsonl"
    interrupted(popen(command, out), lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)] and len(lines) < STEPS
    assert not (out / "error.txt").exists()
    assert_nothing_left(out)
    assert not (out / CLAIM_FILE).exists()
    check_another_replay(command, out, tmp_path / "model")


def check_another_replay(command: list[str], out: Path, model: Path) -> None:
    """The directory is free. The steps have the numbers of the run itself, and the policy is exported."""
    again = subprocess.run(
        [*command, "--steps", "2", "--export"], cwd=ROOT, env=environment(), text=True, capture_output=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    before = [json.loads(line) for line in (out / "previous" / "1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy/loss"] for line in before[:2]] == [line["policy/loss"] for line in lines]
    assert lines[0]["policy/updates"] == UPDATES and lines[0]["time/update"] > 0
    assert differing(out / "hf", model) and read_hf(out / "hf").keys() == read_hf(model).keys()
    assert (out / "hf" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("moment", ["the pool starts", "it evaluates"])
def test_an_evaluation_that_is_interrupted(moment: str, tmp_path: Path) -> None:
    data, run_dir = tmp_path / "heldout.jsonl", tmp_path / "run"
    data.write_text("".join(json.dumps({"problem": f"What is {i}?", "answer": str(i)}) + "\n" for i in range(200)))
    command = [
        sys.executable, "-m", "megarl", "eval", "--model", str(make_tiny_model(tmp_path / "model")), "--data",
        str(data), "--samples", "64", "--run-dir", str(run_dir), 
        "timeouts.engine_start_s=1200",
    ]  # fmt: skip
    state = run_dir / "supervisor.json"

    def now() -> bool:
        if moment == "the pool starts" or not state.is_file():
            return state.is_file()
        if json.loads(state.read_text())["state"] != "ready":
            return False
        time.sleep(3)  # the requests are on their way; all of them take minutes
        return True

    interrupted(popen(command, run_dir), now)
    assert_nothing_left(run_dir)
