"""The processor time of a step of a living run, of all its processes, and what of it observability takes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from observability_base import StepSize
from soak_processes import below_supervisor

POLL_S = 0.2


def cpu_of_job(size: StepSize, seconds: Mapping[str, float]) -> float:
    """Return the processor seconds of observability in one step, of all processes. `seconds`: of each row."""
    each_rank, each_replica = seconds["events of trainer rank 0"], seconds["steps of an engine in its replica"]
    once = sum(value for name, value in seconds.items() if name != "steps of an engine in its replica")
    return once + (size.ranks - 1) * each_rank + size.replicas * each_replica


def cpu_of_step(run_dir: Path, steps: int, timeout_s: float) -> float | None:
    """Return the processor seconds per step of all processes of a run, over `steps` steps; None if it does not live.

    A run that ends meanwhile is measured up to its last step. The time of processes that have begun or ended meanwhile
    counts as far as it is seen. Raises TimeoutError.
    """
    if not _processes(run_dir):
        return None
    first, used = _last_step(run_dir), dict[tuple[int, float], float]()
    begun = _times(run_dir)
    deadline = time.monotonic() + timeout_s
    while (last := _last_step(run_dir)) < first + steps:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run_dir} made {last - first} of {steps} steps in {timeout_s:.0f} s")
        if not (now := _times(run_dir)):
            break  # the run has ended
        used |= now
        time.sleep(POLL_S)
    used |= _times(run_dir)
    if last == first:
        return None
    return sum(value - begun.get(key, 0.0) for key, value in used.items()) / (last - first)


def _processes(run_dir: Path) -> list[psutil.Process]:
    """Return the processes of a run: the launcher of the ranks, the supervisor of the pool, and what is below them."""
    try:
        state = json.loads((run_dir / "supervisor.json").read_text(encoding="utf-8"))
        launcher = psutil.Process(int(state["agent"]["pid"]))
        if not any(str(part).startswith(("torch.", "megarl")) for part in launcher.cmdline()):
            return []  # its pid is another process's by now
        ranks = [launcher, *launcher.children(recursive=True)]
    except (OSError, ValueError, KeyError, psutil.Error):
        return []
    return list({*ranks, *below_supervisor(run_dir, itself=True)})


def _times(run_dir: Path) -> dict[tuple[int, float], float]:
    """Return the processor seconds so far of each process of the run, by its pid and start."""
    found = {}
    for process in _processes(run_dir):
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
        except psutil.Error:
            continue  # it has ended
    return found


def _last_step(run_dir: Path) -> int:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    steps = [json.loads(line)["step"] for line in lines if line.endswith("\n") and '"time/step"' in line]
    return max(steps, default=0)
