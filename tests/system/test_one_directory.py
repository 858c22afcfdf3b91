"""A living run: a second start in its directory is refused, and one Ctrl-C saves and ends it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.leftovers import assert_nothing_left
from tests.support.run import step_records, tiny_config
from tests.support.whole_runs import kill_everything, start_run, wait_for

pytestmark = pytest.mark.engine


def test_a_second_start_is_refused_and_ctrl_c_saves(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, steps=5000)
    config["evaluation"] = {}
    run_dir = tmp_path / "run"
    process = start_run(config)
    try:
        wait_for(lambda: len(step_records(run_dir)) > 1, process)
        again = start_run(config)
        try:
            output, _ = again.communicate(timeout=60)
        finally:
            if again.poll() is None:
                kill_everything(again, run_dir)
        assert again.returncode != 0 and output.count("megarl: ") == 1 and "is in use by torchrun (pid " in output
        assert not (run_dir / "previous").exists() and not (run_dir / "exit.json").exists()
        steps = len(step_records(run_dir))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            kill_everything(process, run_dir)
    assert output.count("megarl: finishing the step, saving; again to abort") == 1, output[-3000:]
    record = json.loads((run_dir / "exit.json").read_text())
    assert record["status"] == "preempted" and record["step"] >= steps
    assert (run_dir / "checkpoints" / f"iter_{record['step']:07d}" / "manifest.json").is_file()
    assert not (run_dir / "claim.json").exists()
    assert_nothing_left(run_dir)
