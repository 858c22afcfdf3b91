"""Whole runs for benchmarks: torchrun on a config, its parts pinned to cores, and the content of its files.

megarl does not pin its processes. A benchmark does it from outside, by the names of the processes, again and again
while the run lasts, so that threads and processes that start late are pinned too.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.lib.report import ROOT
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config

SCRIPT = ROOT / "examples" / "rl" / "train_rl.py"
QUICKSTART = ROOT / "examples" / "rl" / "configs" / "quickstart_cpu.yaml"
ASSETS_S = 600.0
PIN_EVERY_S = 1.0
REPLICA = "ray::EngineReplica"


@dataclass(frozen=True)
class Cores:
    """The cores of the trainer's ranks, of the engines, and of all other processes of a run."""

    trainer: frozenset[int]
    engine: frozenset[int]
    others: frozenset[int]

    @classmethod
    def one_each(cls) -> Cores:
        """Return one core for the trainer and one for the engine. Raises SystemExit if this process has only one."""
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            raise SystemExit(f"two cores are needed, one for the trainer and one for the engine; only {cores} is given")
        # Controller, queue and rewards get both: on a machine with more cores they would be somewhere else.
        return cls(frozenset(cores[:1]), frozenset(cores[1:2]), frozenset(cores[:2]))

    @classmethod
    def both(cls) -> Cores:
        """Return the two cores of `one_each` for all processes."""
        both = cls.one_each().others
        return cls(both, both, both)

    def of(self, part: str) -> frozenset[int]:
        """Return the cores of a process that is this part of a run (see `part_of`)."""
        return {"rank": self.trainer, "replica": self.engine, "engine": self.engine}.get(part, self.others)


def part_of(command: Sequence[str], parent: Sequence[str]) -> str:
    """Return which part of a run a process is: "rank", "replica", "engine", or "" for all others.

    By its command line and that of the process that has started it. A replica's actor only passes on what its child,
    the engine, computes; the title that vLLM gives that child needs room in its environment, which it may not have.
    """
    if str(SCRIPT) in command and "torch.distributed.run" not in command:
        return "rank"
    if "".join(command[:1]).startswith(REPLICA):
        return "replica"
    helper = any("resource_tracker" in part for part in command)  # Python's own, alongside what it has spawned
    return "engine" if "".join(parent[:1]).startswith(REPLICA) and not helper else ""


def environment() -> dict[str, str]:
    """Return the environment of a run: it imports this checkout and computes with one thread per process."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def make_assets(directory: Path) -> None:
    """Make the quickstart's data and model, unless they are there. Raises SystemExit if that fails."""
    command = [sys.executable, "-m", "examples.quickstart", "--out", str(directory)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), timeout=ASSETS_S, check=False)
    if ended.returncode:
        raise SystemExit(f"the quickstart's data and model could not be made in {directory}")


def torchrun(config: Path, ranks: int, restarts: int = 0) -> list[str]:
    """Return the command of a run on this machine, as a user would give it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "megarl"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return [*command, str(SCRIPT), "--config", str(config)]


def train(
    config: dict[str, Any], *, ranks: int = 1, cores: Cores | None = None, timeout_s: float
) -> list[dict[str, Any]]:
    """Run torchrun on `config`, whose `run.dir` must not exist; return its steps (see `step_records`).

    Raises SystemExit with the end of its output if it fails or does not end within `timeout_s`.
    """
    directory = Path(config["run"]["dir"])
    path = directory.with_suffix(".yaml")
    path.write_text(yaml.safe_dump({"checkpoint": {"every": 0}} | config), encoding="utf-8")
    log = directory.with_suffix(".log")
    code = run_command(torchrun(path, ranks), log, timeout_s, environment(), cores)
    if code:
        raise SystemExit(f"{directory.name} failed:\n{log.read_text(errors='replace')[-3000:]}")
    return step_records(directory)


def run_command(
    command: list[str], log: Path, timeout_s: float, env: Mapping[str, str], cores: Cores | None = None
) -> int:
    """Run the command of a job, add its output to `log`, and return its exit code.

    Raises SystemExit after `timeout_s`, when its process group is killed, or if nothing was found to be pinned.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    pinner = Pinner(process.pid, cores) if cores is not None else None
    try:
        code = process.wait(timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the supervisor notices, and ends the pool
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise SystemExit(f"{log.stem} did not end within {timeout_s:.0f} s; see {log}") from None
    finally:
        if pinner is not None:
            pinner.stop()
    if pinner is not None and not code:
        pinner.check()
    return code


class Pinner:
    """Pins the threads of all processes below `root` until `stop`, in a thread of its own."""

    def __init__(self, root: int, cores: Cores) -> None:
        self._root, self._cores = root, cores
        self._pinned: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pin", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join(10.0)

    def check(self) -> None:
        """Raise SystemExit unless both a trainer's rank and an engine were found."""
        if missing := {"rank", "engine"} - self._pinned:
            raise SystemExit(f"nothing was pinned that is a run's {' or '.join(sorted(missing))}: names have changed")

    def _run(self) -> None:
        while not self._end.wait(PIN_EVERY_S):
            for process in _below(self._root):
                try:
                    part = part_of(process.cmdline(), psutil.Process(process.ppid()).cmdline())
                    _pin(process.pid, self._cores.of(part))
                except (psutil.Error, OSError):
                    continue  # it has ended
                self._pinned.add(part)


def _below(root: int) -> list[psutil.Process]:
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.Error:
        return []


def _pin(pid: int, cores: frozenset[int]) -> None:
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            if os.sched_getaffinity(int(task)) != cores:
                os.sched_setaffinity(int(task), cores)
        except ProcessLookupError:
            continue  # the thread has ended


def step_records(directory: Path) -> list[dict[str, Any]]:
    """Return the training steps of a run's metrics.jsonl in order."""
    return [record for record in _lines(directory / "metrics.jsonl") if "time/step" in record]


def response_lengths(directory: Path) -> list[int]:
    """Return the numbers of response tokens in all parts of a run's samples.jsonl that it has kept."""
    older = sorted(directory.glob("samples.[0-9]*.jsonl"))
    return [line["response_tokens"] for part in (*older, directory / "samples.jsonl") for line in _lines(part)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def measure(
    config: dict[str, Any], skip: int, steps: int, *, ranks: int = 1, cores: Cores | None = None, timeout_s: float
) -> tuple[Window, list[dict[str, Any]]]:
    """Run `config` for as many steps as it takes to measure `steps` after `skip`; return the window and all steps.

    Raises ValueError for a window that `steps_after` refuses, and SystemExit as `train` does.
    """
    after = steps_after(config, steps)
    config["run"]["steps"] = skip + steps + after
    records = train(config, ranks=ranks, cores=cores, timeout_s=timeout_s)
    return Window.of(records, skip, steps), records


def steps_after(config: dict[str, Any], steps: int) -> int:
    """Return how many steps must follow a window of `steps`, so that as much is generated in it as is trained.

    What runs ahead has groups for later steps when the window begins. As many must be there at its end: the run must
    not end before the last step that the bound allows then, and both must have the same place between two publications.
    Raises ValueError if they have not.
    """
    pace = pace_of(Config.model_validate(config))
    if not pace.runs_ahead:
        return 0
    interval = pace.sync_interval // pace.updates_per_step
    if steps % interval:
        raise ValueError(f"the weights are published every {interval} steps: a window cannot have {steps}")
    return pace.steps_within_bound(0)


@dataclass(frozen=True)
class Window:
    """Steps of a run, from the end of the last one before them to the end of the last of them.

    `samples_per_s` and `tokens_per_s` (response tokens of the loss) count what was trained on. The other values are
    seconds per step: its wall time, the trainer's wait for rollouts (for a batch, or for responses that end before a
    publication), its passes, the sync of weights, and the rest.
    """

    steps: int
    samples_per_s: float
    tokens_per_s: float
    step_s: float
    wait_s: float
    train_s: float
    sync_s: float

    @property
    def rest_s(self) -> float:
        return self.step_s - self.wait_s - self.train_s - self.sync_s

    @property
    def imbalance(self) -> float:
        """The longer one of the wait and the training over the shorter one."""
        return max(self.wait_s, self.train_s) / max(min(self.wait_s, self.train_s), 1e-9)

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], skipped: int, steps: int) -> Window:
        """The `steps` steps after the first `skipped`. Raises ValueError unless both are there."""
        if skipped < 1 or steps < 1 or skipped + steps > len(records):
            raise ValueError(f"{len(records)} steps were made: {steps} after at least 1, {skipped}, cannot be measured")
        chosen = records[skipped : skipped + steps]
        seconds = chosen[-1]["wall_time"] - records[skipped - 1]["wall_time"]

        def total(*names: str) -> float:
            return sum(record.get(name) or 0.0 for record in chosen for name in names)

        return cls(
            steps=steps,
            samples_per_s=total("batch/trained_samples") / seconds,
            tokens_per_s=total("batch/loss_tokens") / seconds,
            step_s=seconds / steps,
            wait_s=total("time/generate", "time/drain") / steps,
            train_s=total("time/logprobs", "time/update") / steps,
            sync_s=total("time/sync") / steps,
        )

    def details(self) -> dict[str, str]:
        """Return the seconds per step, for the report."""
        names = {"step": self.step_s, "waiting for rollouts": self.wait_s, "training": self.train_s}
        names |= {"sync": self.sync_s, "rest": self.rest_s}
        return {"seconds per step": ", ".join(f"{name} {value:.3f}" for name, value in names.items())}


def median_window(windows: Sequence[Window]) -> Window:
    """Return the window of the median step time (the faster of the middle two), not a mixture of several."""
    middle = statistics.median_low([window.step_s for window in windows])
    return next(window for window in windows if window.step_s == middle)


def fresh(directory: Path, name: str) -> Path:
    """Return a path for a run below `directory` that does not exist yet."""
    return directory / f"{name}-{time.time_ns()}"
