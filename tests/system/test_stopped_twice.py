"""Ctrl-C twice at any moment of a launch: all of it ends at once, and one message says how to go on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.support.checkout import ROOT, environment
from tests.support.leftovers import assert_nothing_left, survivors
from tests.support.run import tiny_config

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENDS_S = 30.0
AGAIN_S = 1.5  # after which a second signal is a second request


def launch(config: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start launch/local.sh in a process group of its own, as a shell does for what a user starts."""
    with log.open("wb") as output:
        return subprocess.Popen(
            ["launch/local.sh", str(config)], cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


# By experience: the config is checked for 8 s, the engines start for 40 s, then the run takes steps and saves.
@pytest.mark.parametrize(("seed", "first_s", "last_s"), [(0, 0.5, 8.0), (1, 8.0, 40.0), (2, 40.0, 70.0)])
def test_ctrl_c_twice_ends_everything_at_any_moment(tmp_path: Path, seed: int, first_s: float, last_s: float) -> None:
    config = tiny_config(tmp_path, steps=100_000)
    config["evaluation"], config["checkpoint"] = {}, {"every": 1}
    path, log, run_dir = tmp_path / "config.yaml", tmp_path / "launch.log", tmp_path / "run"
    path.write_text(yaml.safe_dump(config))
    moment = random.Random(f"stopped-twice-{seed}").uniform(first_s, last_s)
    process = launch(path, log)
    try:
        time.sleep(moment)
        assert process.poll() is None, log.read_text()[-4000:]
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(AGAIN_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        begun = time.monotonic()
        code = process.wait(timeout=ENDS_S)
        assert_nothing_left(run_dir, ENDS_S - (time.monotonic() - begun))
    finally:
        for each in (process, *survivors(run_dir)):
            each.kill()
    said = [line for line in log.read_text().splitlines() if line.startswith("megarl: ")]
    how = [line for line in said if "the same command " in line]
    assert code != 0 and len(how) == 1, f"after {moment:.1f} s:\n{log.read_text()[-4000:]}"
    assert "Traceback" not in log.read_text(), f"after {moment:.1f} s:\n{log.read_text()[-4000:]}"
    assert not (run_dir / "claim.json").exists() or moment < 8.0
