"""A trainer rank is stopped (SIGSTOP) in the middle of a run: nothing but its silence tells. Another one is killed."""

import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.lib.file_faults import complete, damage, refused
from megarl.cluster.pool.pool_process import read_state
from tests.support.checkout import ROOT
from tests.support.pool.leftovers import assert_nothing_left, marked
from tests.support.runs.fault_table import moments
from tests.support.runs.run import Run
from tests.support.runs.whole_runs import (
    check_counters,
    check_every_group_once,
    config_of,
    killed_after,
    metric_steps,
    ranks_of,
    start_run,
    wait_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 20
BOUND_S, SHUTDOWN_S = 12, 20


@pytest.mark.parametrize("starter", ["torchrun", "launch"])
def test_a_stopped_rank_is_named_and_killed_and_the_run_goes_on_from_a_sound_checkpoint(
    tmp_path: Path, starter: str
) -> None:
    """A random rank at a random moment. Without the watch its peers would wait for it for `timeouts.generate_s`.

    A byte of the newest checkpoint is changed meanwhile, so the one before is resumed. After that a rank is killed.
    torchrun, also that of `megarl launch`, leaves the ranks the time to save, if they need it.
    """
    rng = moments()
    timeouts = {"node_s": BOUND_S, "shutdown_s": SHUTDOWN_S, "save_s": 400, "generate_s": 400}
    config = config_of(tmp_path, steps=STEPS, timeouts=timeouts, launch={"max_restarts": 2})
    config["evaluation"] = {}
    run_dir = tmp_path / "run"
    saves = run_dir / "checkpoints"
    process = start_run(config, restarts=2) if starter == "torchrun" else launch(tmp_path, config)
    with killed_after(process, run_dir):
        step = rng.randint(3, 10)
        wait_for(lambda: metric_steps(run_dir) >= step and len(complete(saves)) >= 2, process)
        time.sleep(rng.uniform(0.0, 1.0))
        number = rng.randrange(2)
        [victim] = [rank for rank in ranks_of(torchrun_of(process)) if rank.environ()["RANK"] == str(number)]
        victim.suspend()
        began = time.monotonic()
        wait_for((run_dir / "error.txt").exists, process, timeout_s=BOUND_S + 60)
        named, done = time.monotonic(), metric_steps(run_dir)
        newest = complete(saves)[-1]
        print(f"{damage(newest, rng)} of {newest.name} is damaged")
        assert named - began > BOUND_S / 2, "a rank that was silent for so short a time may be sound"
        wait_for(lambda: has_ended(victim), process, timeout_s=SHUTDOWN_S)
        wait_for(lambda: metric_steps(run_dir) > done + 1, process)
        print(f"two further steps {time.monotonic() - began:.0f} s after the stop, named after {named - began:.0f} s")
        killed, done = time.monotonic(), metric_steps(run_dir)
        rng.choice(ranks_of(torchrun_of(process))).kill()
        wait_for(lambda: metric_steps(run_dir) > done + 1, process)
        print(f"two further steps {time.monotonic() - killed:.0f} s after the kill")
        output, _ = process.communicate(timeout=200)
    run = Run(process.returncode, output, run_dir)
    assert run.code == 0 and run.summary["exit"] == "finished", output[-4000:]
    # A rank shows signs every 2 s: where steps are fast, its last one may be older than its first step.
    silent = r"trainer rank (\d+) on (\S+) has been silent for (\d+) s (?:after step \d+|while it was starting):"
    [(rank, host, seconds)] = re.findall(silent, output)
    assert (rank, host) == (str(number), platform.node()) and BOUND_S <= int(seconds) <= BOUND_S + 5
    assert output.count("(rank ") <= 2, "one cause gives one message"
    assert output.count("resuming from") == 2 and refused(newest)
    state = read_state(run_dir)
    assert state is not None and state["attempt"] == 0, "the pool was kept"
    check_counters(run, STEPS)
    check_every_group_once(run, STEPS)
    assert_nothing_left(run_dir)


def launch(directory: Path, config: dict[str, Any]) -> subprocess.Popen[str]:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return subprocess.Popen(
        ["launch/local.sh", str(path)], cwd=ROOT, env=marked(config["run"]["dir"]), stdin=subprocess.DEVNULL, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def torchrun_of(started: subprocess.Popen[str]) -> psutil.Process:
    """The process whose children are the ranks."""
    root = psutil.Process(started.pid)
    found = [each for each in root.children(recursive=True) if "megarl.cluster.torchrun.run" in each.cmdline()]
    return found[0] if found else root


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
