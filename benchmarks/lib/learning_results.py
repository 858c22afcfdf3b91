"""What is kept of the runs of benchmarks/learning.py: one JSON file, from which docs/results.md is drawn."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

RESULTS = Path(__file__).resolve().parents[1] / "results" / "learning.json"
PROBLEMS = "eval/heldout/n"


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Accuracy(_Kept):
    """Shares of right answers on held-out problems, at temperature 0 and sampled at temperature 1."""

    problems: int
    greedy: float
    sampled: float


class LearningRun(_Kept):
    """A run. Lists have one number per step; `staleness`: mean of its samples, in updates; `ess`, `k3_kl`: of the
    trainer's probabilities to those with which the tokens were sampled (mismatch/*); `tool_calls`: per trajectory.
    """

    task: str
    name: str
    seed: int
    seconds: int
    before: Accuracy
    after: Accuracy
    rewards: list[float]
    staleness: list[float]
    ess: list[float]
    k3_kl: list[float]
    tool_calls: list[float]

    def place(self) -> tuple[str, str, int]:
        """Return by what runs are sorted."""
        return self.task, self.name, self.seed

    @classmethod
    def of(cls, run_dir: Path, task: str, name: str, seed: int, seconds: float) -> LearningRun:
        """Return the numbers of a finished run."""
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        evaluations = [_accuracy(line) for line in lines if PROBLEMS in line]
        steps = [line for line in lines if "time/step" in line]

        def values(metric: str, digits: int = 3) -> list[float]:
            return [float(f"{line.get(metric) or 0.0:.{digits}g}") for line in steps]

        return cls(
            task=task, name=name, seed=seed, seconds=round(seconds), before=evaluations[0], after=evaluations[-1],
            rewards=values("reward/mean"), staleness=values("batch/staleness_mean"), ess=values("mismatch/ess", 4),
            k3_kl=values("mismatch/k3_kl"), tool_calls=values("agent/tool_calls_mean"),
        )  # fmt: skip


class Fault(_Kept):
    """A fault, `at_s` after the first step, and the seconds until the run had gone on with what was lost."""

    name: str
    at_s: float
    recovered_s: float
    redone_steps: int


class Recovery(_Kept):
    """A run under faults, in which a part that was silent for `rpc_s` was lost. `steps`, `redone` [s]: the ends of its
    steps, and of those that a resume has discarded.
    """

    rpc_s: float
    steps: list[float]
    redone: list[float]
    rewards: list[float]
    faults: list[Fault]


class Results(_Kept):
    """All that is kept."""

    runs: list[LearningRun] = []
    recovery: Recovery | None = None

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the content of a file; nothing if there is none."""
        return cls.model_validate_json(path.read_text(encoding="utf-8")) if path.is_file() else cls()

    @classmethod
    def add(cls, path: Path, made: LearningRun | Recovery) -> None:
        """Add a run to a file, of which it reads what another process has added meanwhile."""
        results = cls.read(path)
        if isinstance(made, LearningRun):
            results.runs.append(made)
        else:
            results.recovery = made
        results._write(path)

    def _write(self, path: Path) -> None:
        """Write one line for each run, so that a new one is a line of a diff."""
        runs = ",\n".join(
            json.dumps(run.model_dump(), separators=(",", ":")) for run in sorted(self.runs, key=LearningRun.place)
        )
        recovery = json.dumps(self.recovery and self.recovery.model_dump(), separators=(",", ":"))
        temporary = path.with_suffix(".tmp")
        temporary.write_text(f'{{"recovery": {recovery},\n"runs": [\n{runs}\n]}}\n', encoding="utf-8")
        os.replace(temporary, path)

    def has(self, task: str, name: str, seed: int) -> bool:
        """Return True if the run is there."""
        return any(run.place() == (task, name, seed) for run in self.runs)


def _accuracy(line: dict[str, Any]) -> Accuracy:
    greedy, sampled = (round(line[f"eval/heldout/{kind}"], 4) for kind in ("greedy", "sampled"))
    return Accuracy(problems=line[PROBLEMS], greedy=greedy, sampled=sampled)
