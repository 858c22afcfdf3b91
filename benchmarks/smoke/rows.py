"""The rows of the smoke test: one measured value against a reference, with a bound on their ratio."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.report import Ratio


@dataclass(frozen=True)
class Where:
    """The device of a run. `tiny`: shapes for a CPU, on which only the code is tested, not its speed."""

    device: torch.device
    tiny: bool

    def synchronize(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def row(
    name: str, measured: float, reference: float, bound: float, unit: str, details: dict[str, Any] | None = None
) -> Ratio:
    """Return one line of the table. It is good if `measured / reference` is at most `bound`; both are in `unit`.

    If the reference is 0 and the measured value is not, the ratio is infinite.
    """
    ratio = measured / reference if reference else float("inf") if measured else 0.0
    values = {"measured": measured, "reference": reference, "unit": unit}
    return Ratio(name, ratio, bound, details={**values, **(details or {})})


@dataclass(frozen=True)
class StepResult:
    """The rows of one step, how long it took, and why something was left out or failed (empty if nothing)."""

    step: str
    rows: tuple[Ratio, ...]
    seconds: float
    left_out: tuple[str, ...] = ()
    error: str = ""

    @property
    def ok(self) -> bool:
        """True if the step ended and all its bounds hold."""
        return not self.error and all(row.ok for row in self.rows)


def write_step(path: Path, rows: Sequence[Ratio], left_out: Sequence[str]) -> None:
    """Write what a step's own process has measured."""
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows], "left_out": list(left_out)}), encoding="utf-8")


def read_step(path: Path, step: str, seconds: float, error: str) -> StepResult:
    """Read the file of `write_step`. A step without rows has failed, unless it says what it left out."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"rows": [], "left_out": []}
    rows, left_out = tuple(Ratio(**row) for row in content["rows"]), tuple(content["left_out"])
    return StepResult(step, rows, seconds, left_out, error or ("" if rows or left_out else "it measured nothing"))


def table(results: Sequence[StepResult]) -> str:
    """Return the table in Markdown, one line per row, followed by what was left out and what failed."""
    lines = ["| step | what | measured | reference | ratio | bound | ok |", "|---|---|---|---|---|---|---|"]
    for result in results:
        for row in result.rows:
            lines.append(
                f"| {result.step} | {row.name} | {row.details['measured']:.4g} {row.details['unit']} "
                f"| {row.details['reference']:.4g} {row.details['unit']} | {row.ratio:.3f} | {row.bound:g} "
                f"| {'yes' if row.ok else '**NO**'} |"
            )
        if result.error:
            lines.append(f"| {result.step} | **failed** | | | | | **NO** |")
    lines.append("")
    lines += [f"- {result.step}: left out: {reason}" for result in results for reason in result.left_out]
    lines += [f"- {result.step}: FAILED: {result.error}" for result in results if result.error]
    lines.append("- seconds per step: " + ", ".join(f"{result.step} {result.seconds:.0f}" for result in results))
    return "\n".join(lines) + "\n"
