"""The numbers of a quickstart that its picture needs, from the run's metrics.jsonl, kept alongside the picture."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

COMMAND = "make quickstart"


class Evaluation(BaseModel):
    """Shares of right answers with their 95% intervals: at temperature 0 and sampled at temperature 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    problems: int
    greedy: tuple[float, float, float]  # value, low, high
    sampled: tuple[float, float, float]


class QuickstartRun(BaseModel):
    """A run. `rewards`, `stderrs` [steps]: mean reward of each step's samples and its standard error over groups."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    commit: str
    date: str
    machine: str
    samples_per_step: int
    rewards: list[float]
    stderrs: list[float]
    evaluations: list[Evaluation]


def reduced(run_dir: Path) -> QuickstartRun:
    """Return the numbers of a finished run; its date is that of its last step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "reward/mean" in line]
    return QuickstartRun(
        command=COMMAND,
        commit=_commit(),
        date=datetime.datetime.fromtimestamp(lines[-1]["wall_time"], datetime.UTC).date().isoformat(),
        machine=_machine(),
        samples_per_step=_samples(run_dir),
        rewards=[_rounded(line["reward/mean"]) for line in steps],
        stderrs=[_rounded(line["reward/stderr"]) for line in steps],
        evaluations=[_evaluation(line) for line in lines if "eval/additions/greedy" in line],
    )


def _evaluation(line: dict[str, Any]) -> Evaluation:
    def interval(kind: str) -> tuple[float, float, float]:
        value, low, high = (_rounded(line[f"eval/additions/{kind}{end}"]) for end in ("", "_low", "_high"))
        return value, low, high

    return Evaluation(
        step=line["step"], problems=line["eval/additions/n"], greedy=interval("greedy"), sampled=interval("sampled")
    )


def _samples(run_dir: Path) -> int:
    import yaml

    batch = yaml.safe_load((run_dir / "config.yaml").read_text())["batch"]
    return int(batch["groups"] * batch["samples_per_group"])


def _commit() -> str:
    """Return the newest commit of what the run is made of, or "unknown" outside a checkout."""
    command = ["git", "log", "-1", "--format=%h", "--abbrev=10", "--", "megarl", "examples"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=root)
    return done.stdout.strip() or "unknown"


def _machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {models[0].partition(':')[2].strip()}" if models else f"{os.cpu_count()} cores"


def _rounded(value: float) -> float:
    return round(float(value), 4)
