"""A living run: a second start in its directory is refused, and a second Ctrl-C ends all of it at once."""

import signal
from pathlib import Path

import pytest
import yaml

from tests.support.pool.leftovers import survivors
from tests.support.runs.run import step_records, tiny_config
from tests.support.runs.two_signals import check_end, launch, press_twice
from tests.support.runs.whole_runs import kill_everything, start_run
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_second_start_is_refused_and_ctrl_c_twice_ends_an_evaluation_at_once(tmp_path: Path) -> None:
    """It evaluates from its beginning for longer than the second start and the signals take."""
    config = tiny_config(tmp_path, steps=5000)
    mark, run_dir = tmp_path / "evaluating", tmp_path / "run"
    function = {"function": "tests.support.rewards.reward_functions:slow_and_marked"}
    config["evaluation"]["sets"][0]["reward"] = function | {"kwargs": {"mark": str(mark), "seconds": 8.0}}
    config["reward"] |= {"workers": 1, "trial_call": False}  # which would leave the mark
    path, log = tmp_path / "launched.yaml", tmp_path / "launch.log"
    path.write_text(yaml.safe_dump(config))
    process = launch(path, log)
    try:
        wait_until(lambda: mark.exists() or process.poll() is not None, 240, "the evaluation")
        again = start_run(config)
        try:
            output, _ = again.communicate(timeout=240)
        finally:
            if again.poll() is None:
                kill_everything(again, run_dir)
        assert again.returncode != 0 and output.count("megarl: ") == 1 and "is in use by megarl launch (pid " in output
        assert not (run_dir / "previous").exists() and not (run_dir / "exit.json").exists()
        press_twice(process, signal.SIGINT, log)
        check_end(process, signal.SIGINT, log, run_dir, "in an evaluation")
    finally:
        for each in (process, *survivors(run_dir)):
            each.kill()
    assert not step_records(run_dir), "the evaluation had ended"
    assert not (run_dir / "claim.json").exists()
