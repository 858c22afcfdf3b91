"""A job that is started again by the same command after a fault has ended it, as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_place import OneMachine, RunPlace  # noqa: E402
from soak_processes import processes_left  # noqa: E402
from whole_run import ROOT, environment, step_records  # noqa: E402

LEAVE_S = 60.0  # for the processes of a job that has ended, before it is started again


def run_job(
    config: dict[str, Any],
    *,
    ranks: int,
    restarts: int,
    starts: int,
    timeout_s: float,
    say: Callable[[str], None],
    variables: Mapping[str, str] | None = None,
    ended: Callable[[int], object] = lambda code: None,
    place: RunPlace | None = None,
) -> list[dict[str, Any]]:
    """Run a config to its end and return its steps; torchrun may restart the ranks, and this function the job.

    `starts`: the most starts after the first one. `variables`: added to the environment. `ended`: is called with the
    exit code of each job that has ended, before another one is started. `place`: where it runs; None: on this machine.

    Raises SystemExit with the end of the output if that is not enough, if a job that has ended leaves processes behind,
    or after `timeout_s`.
    """
    place = place or OneMachine()
    directory, until = Path(config["run"]["dir"]), time.monotonic() + timeout_s
    path, log = directory.with_suffix(".yaml"), directory.with_suffix(".log")
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command, told = place.command(path, ranks, restarts), {**place.variables(), **(variables or {})}
    for start in range(starts + 1):
        code = _run_once(command, log, until, timeout_s, {**environment(), **told})
        ended(code)
        if code == 0 and _status(directory) != "preempted":  # a stop request may have ended it before its last step
            return step_records(directory)
        tail = log.read_text(errors="replace")[-3000:]
        if left := processes_left(directory, min(LEAVE_S, max(0.0, until - time.monotonic()))):
            raise SystemExit(f"{directory.name} ended with code {code} and left {', '.join(left)}:\n{tail}")
        if start < starts:
            say(f"the job has ended with code {code}, left no process, and is started again")
    raise SystemExit(f"{directory.name} failed:\n{tail}")


def _status(directory: Path) -> str:
    """Return how a run says that it has ended; "" if it does not."""
    path = directory / "exit.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["status"]) if path.is_file() else ""


def _run_once(command: list[str], log: Path, until: float, timeout_s: float, env: Mapping[str, str]) -> int:
    """Start the command and return its exit code. Raises SystemExit at `until`, and then kills its group."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the supervisor notices, and ends the pool
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise SystemExit(f"{log.stem} did not end within {timeout_s:.0f} s; see {log}") from None
