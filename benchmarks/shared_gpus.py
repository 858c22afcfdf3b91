"""Trainer and engines that take turns on the same two cores, against one core for each side.

    python -m benchmarks.shared_gpus [--json FILE] [--quick]

A core stands for a GPU, with one rank or one engine of one thread on it. Real runs (torchrun, vLLM, Ray) of the same
synchronous work (`MODES`):

- separate: one rank on one core, one engine on the other;
- shared: two ranks and two engines on both cores (`rollout.share_gpus`), which move their memory in each step;
- kept: the same ranks and engines without sharing, so that both sides have both cores in turn and keep their memory. No
  GPU could hold that; it is what sharing would reach if moves were free.

The model has 100 M parameters, and responses end at nearly the same length. First the number of responses that an
engine computes at the same time is chosen so that generation and training each take about half of a separate step: an
engine that is full makes generation proportional to the responses. Then the modes run in turn, `--rounds` times; each
mode's run of the median step time counts, in `--steps` steps after `--skip`. Rows:

- shared / separate: samples per second;
- shared / kept: the same;
- hand-overs / step: the part of a shared step in which memory is moved, that is `time/sync` without the publication
  itself (`sync/seconds`);
- balance: what the first row rests on.

It takes about half an hour, with --quick a few minutes. Other work on the machine slows the modes that use both
cores at once, and hardly the separate one, in which one of both waits: the ratio is then too low.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.length_model import LengthClass, write_model, write_prompts
from benchmarks.lib.report import Ratio, finish, new_parser
from benchmarks.lib.whole_run import Cores, Window, fresh, measure, median_window

SPEED_UP = 1.3
SHARE_OF_KEPT = 0.9
HAND_OVERS = 0.1  # of a step
BALANCE = 1.35  # the longer of generation and training over the shorter one
CLASSES = (LengthClass(1.0, 400),)
MAX_TOKENS = 64  # far below the mean, so that nearly all responses end here
SAMPLES_PER_GROUP = 8
CALIBRATIONS = 3
RUN_S = 1800.0  # that one run may take
SEPARATE, SHARED, KEPT = MODES = ("separate", "shared", "kept")


@dataclass(frozen=True)
class MeasuredRun:
    """The window of a run, and the seconds per step in which it moved memory between both sides."""

    window: Window
    moves_s: float

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], skip: int, steps: int) -> MeasuredRun:
        """The `steps` steps after the first `skip`."""
        chosen = records[skip : skip + steps]
        moves_s = sum(record["time/sync"] - record["sync/seconds"] for record in chosen) / steps
        return cls(Window.of(records, skip, steps), moves_s)


def run_config(options: argparse.Namespace, directory: Path, mode: str, sequences: int) -> dict[str, Any]:
    """Return the config of a run, whose engines compute `sequences` responses at once; `measure` sets the steps."""
    each = 1 if mode == SEPARATE else 2
    return {
        "run": {"name": "shared_gpus", "dir": str(fresh(directory, mode)), "steps": 1, "export": False},
        "model": {"path": str(directory / "model")},
        "trainer": {
            "gpus": each,
            "precision": "fp32",
            "micro_batch_tokens": 512,
            # So low that the lengths stay what they are.
            "optimizer": {"lr": 1e-7, "weight_decay": 0.0},
        },
        "algorithm": {"filter_zero_variance": False},
        "batch": {"groups": options.groups, "samples_per_group": SAMPLES_PER_GROUP},
        "sampling": {"max_tokens": MAX_TOKENS},
        "admission": {"mode": "sync"},
        "data": {"path": str(directory / "prompts.jsonl")},
        "reward": {"function": "benchmarks.lib.length_model:letter_share"},
        "rollout": {"replicas": each, "share_gpus": mode == SHARED, "max_num_seqs": sequences},
        "telemetry": {"tensorboard": False},
    }


def run_mode(mode: str, options: argparse.Namespace, directory: Path, sequences: int, steps: int) -> MeasuredRun:
    config = run_config(options, directory, mode, sequences)
    ranks, cores = config["trainer"]["gpus"], Cores.one_each() if mode == SEPARATE else Cores.both()
    window, records = measure(config, options.skip, steps, ranks=ranks, cores=cores, timeout_s=RUN_S)
    print(f"{mode}, {sequences} at the same time: {window.details()['seconds per step']}")
    return MeasuredRun.of(records, options.skip, steps)


def calibrate(options: argparse.Namespace, directory: Path) -> int:
    """Return the number of responses at the same time with which generation takes as long as training."""
    sequences = options.sequences
    for _ in range(CALIBRATIONS):
        window = run_mode(SEPARATE, options, directory, sequences, steps=1).window
        wanted = max(1, round(sequences * window.wait_s / max(window.train_s, 1e-9)))
        if wanted == sequences or window.imbalance <= (1 + BALANCE) / 2:
            break
        sequences = wanted
    return sequences


def rows_of(runs: Mapping[str, Sequence[MeasuredRun]], sequences: int) -> list[Ratio]:
    """Return the rows of the report from all runs of each mode."""
    windows = {mode: median_window([run.window for run in each]) for mode, each in runs.items()}
    separate, shared = windows[SEPARATE], windows[SHARED]
    moves_s = next(run.moves_s for run in runs[SHARED] if run.window is shared)

    def facts(*modes: str) -> dict[str, str]:
        found = {}
        for mode in modes:
            found[f"{mode}: samples/s of each run"] = ", ".join(f"{run.window.samples_per_s:.3f}" for run in runs[mode])
            found |= {f"{mode}: {name}": value for name, value in windows[mode].details().items()}
        return found

    def faster(than: str, bound: float) -> Ratio:
        ratio = shared.samples_per_s / windows[than].samples_per_s
        return Ratio(f"shared / {than}", ratio, bound, at_least=True, details=facts(SHARED, than))

    return [
        faster(SEPARATE, SPEED_UP),
        faster(KEPT, SHARE_OF_KEPT),
        Ratio("hand-overs / step", moves_s / shared.step_s, HAND_OVERS, details={"seconds": round(moves_s, 3)}),
        Ratio(
            "balance: longer / shorter of Tgen, Ttrain", separate.imbalance, BALANCE,
            details={"responses at the same time": sequences},
        ),
    ]  # fmt: skip


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode, in turn")
    parser.add_argument("--steps", type=int, default=3, help="steps of a run that are measured")
    parser.add_argument("--skip", type=int, default=1, help="steps that are not measured, at the start of a run")
    parser.add_argument("--groups", type=int, default=8, help="groups of 8 responses per step")
    parser.add_argument("--sequences", type=int, default=10, help="responses of an engine at the same time, at first")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.groups = 1, 1, 2
    with tempfile.TemporaryDirectory(prefix="shared-gpus-") as name:
        directory = (options.keep or Path(name)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        size = {"hidden": 128, "layers": 2} if options.quick else {"hidden": 768, "layers": 14}
        print(f"model: {write_model(directory / 'model', CLASSES, **size)} parameters")
        write_prompts(directory / "prompts.jsonl", CLASSES, 1000)
        sequences = options.sequences if options.quick else calibrate(options, directory)
        runs: dict[str, list[MeasuredRun]] = {mode: [] for mode in MODES}
        for _ in range(options.rounds):
            for mode, measured in runs.items():
                measured.append(run_mode(mode, options, directory, sequences, options.steps))
    return finish(rows_of(runs, sequences), options)


if __name__ == "__main__":
    sys.exit(main())
