"""Asynchronous against synchronous training on response lengths with a long tail.

    python -m benchmarks.async_vs_sync [--json FILE] [--quick]

Real runs (torchrun, vLLM, Ray) that differ in the sections `admission` and `rollout` only (`MODES`). The trainer has
one core and the engine another one, in all modes; controller, queue and rewards may use both. The model
(benchmarks/lib/length_model.py) ends most responses early and a few late; the run's own samples must have a 99th
percentile of at least 10 times the median.

First the number of groups per step is chosen so that generation and training each take about half of a synchronous
step. Then the modes run in turn, `--rounds` times; each mode's run of the median step time counts. Rates are response
tokens trained per second in `--steps` steps, after `--skip` steps, in which engines warm up and queues fill. As many
steps follow as rollout may be ahead, so that as many responses are generated in what is measured as are trained. Rows:

- async / sync: the speed-up;
- async, whole responses / sync and / async: the same without partial rollouts (`rollout.partial_rollout: false`). Each
  publication then waits until the responses that engines work on have ended, and what is below 1 is lost by that;
- async / possible: the speed-up over (Tgen + Ttrain) / max(Tgen, Ttrain), with Tgen (the trainer's wait for rollouts)
  and Ttrain (its passes) of the synchronous runs. It would be 1 if the shorter one were hidden completely. It may be
  above 1, because an engine that never runs empty also generates faster;
- balance and tail: what the two numbers above rest on.

It takes about half an hour, with --quick a few minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.length_model import LengthClass, quantile, write_model, write_prompts
from benchmarks.lib.report import Ratio, finish, new_parser
from benchmarks.lib.whole_run import Cores, Window, fresh, measure, median_window, response_lengths, steps_after

SPEED_UP = 1.6
SHARE_OF_POSSIBLE = 0.9
TAIL = 10.0  # 99th percentile over median
BALANCE = 1.35  # the longer of generation and training over the shorter one
CLASSES = (LengthClass(0.7, 12), LengthClass(0.2, 40), LengthClass(0.1, 200))
SAMPLES_PER_GROUP = 8
CALIBRATIONS = 4
MAX_TOKENS, MAX_NUM_SEQS = 512, 256
RUN_S = 900.0  # that one run may take

# The sections in which the modes differ. The first two are in the bounds; the third shows what is lost if generation
# does not go on through a publication.
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "sync": {"admission": {"mode": "sync"}},
    "async": {"admission": {"mode": "async"}},
    "async, whole responses": {"admission": {"mode": "async"}, "rollout": {"partial_rollout": False}},
}


def run_config(options: argparse.Namespace, directory: Path, mode: str, groups: int, steps: int) -> dict[str, Any]:
    """Return the config of a run of `steps` steps; `measure` adds those that follow."""
    config: dict[str, dict[str, Any]] = {
        "run": {"name": "async_vs_sync", "steps": steps, "export": False},
        "model": {"path": str(directory / "model")},
        "trainer": {
            "precision": "fp32",
            "micro_batch_tokens": 4096,
            # So low that the lengths stay what they are.
            "optimizer": {"lr": 1e-7, "weight_decay": 0.0},
        },
        # All groups are trained, so that a step has the same work in all modes.
        "algorithm": {"filter_zero_variance": False},
        "batch": {"groups": groups, "samples_per_group": SAMPLES_PER_GROUP},
        "sampling": {"max_tokens": MAX_TOKENS},
        "data": {"path": str(directory / "prompts.jsonl")},
        "reward": {"function": "benchmarks.lib.length_model:letter_share"},
        "rollout": {"max_num_seqs": MAX_NUM_SEQS},
        "telemetry": {"samples_per_step": groups * SAMPLES_PER_GROUP, "tensorboard": False},
    }
    return config | {name: config.get(name, {}) | fields for name, fields in MODES[mode].items()}


def run_mode(
    mode: str, options: argparse.Namespace, directory: Path, groups: int, steps: int, skip: int
) -> tuple[Window, list[int]]:
    """Run one mode; return its window and the lengths of all its responses."""
    run_dir = fresh(directory, mode.replace(", ", "-").replace(" ", "-"))
    config = run_config(options, directory, mode, groups, skip + steps)
    config["run"]["dir"] = str(run_dir)
    window, _ = measure(config, skip, steps, cores=Cores.one_each(), timeout_s=RUN_S)
    print(f"{mode}, {groups} groups: {window.tokens_per_s:.0f} tokens/s, {window.details()['seconds per step']}")
    return window, response_lengths(run_dir)


def calibrate(options: argparse.Namespace, directory: Path) -> int:
    """Return the number of groups at which waiting for rollouts and training take the same time in sync mode."""
    groups = options.groups
    for _ in range(CALIBRATIONS):
        window, _ = run_mode("sync", options, directory, groups, steps=6, skip=options.skip)
        wanted = balanced_groups(groups, window.wait_s, window.train_s)
        if wanted == groups or window.imbalance <= (1 + BALANCE) / 2:
            break
        groups = wanted
    return groups


def balanced_groups(groups: int, wait_s: float, train_s: float) -> int:
    """Return the groups at which both times would be equal. Training grows with the groups; generation, whose time is
    that of the longest responses, is taken to grow with half of them. One step changes the groups by 4 at most.
    """
    # train * x = wait * (1 + x) / 2, where x is the factor of the groups
    difference = 2 * train_s - wait_s
    factor = wait_s / difference if difference > 0 else 4.0
    return max(2, round(groups * min(4.0, max(0.25, factor))))


def possible_speed_up(wait_s: float, train_s: float) -> float:
    """Return the speed-up if the shorter one of generation and training took no time."""
    return (wait_s + train_s) / max(wait_s, train_s)


def rows_of(windows: Mapping[str, Sequence[Window]], lengths: Sequence[int], groups: int) -> list[Ratio]:
    """Return the rows of the report from the windows of all runs of each mode and the lengths of all responses."""
    chosen = {mode: median_window(each) for mode, each in windows.items()}
    sync = chosen["sync"]
    possible = possible_speed_up(sync.wait_s, sync.train_s)

    def rates(mode: str) -> dict[str, str]:
        return {f"{mode}: tokens/s of each run": ", ".join(f"{window.tokens_per_s:.0f}" for window in windows[mode])}

    rows = []
    for mode, window in chosen.items():
        if mode != "sync":
            speed_up = window.tokens_per_s / sync.tokens_per_s
            details = (
                rates("sync") | rates(mode) | {f"{mode}: {name}": value for name, value in window.details().items()}
            )
            judged = mode == "async"
            rows.append(Ratio(f"{mode} / sync", speed_up, SPEED_UP if judged else None, at_least=True, details=details))
            bound = SHARE_OF_POSSIBLE if judged else None
            facts = {"possible": round(possible, 3)}
            rows.append(Ratio(f"{mode} / possible", speed_up / possible, bound, at_least=True, details=facts))
            if not judged and "async" in chosen:
                kept = window.tokens_per_s / chosen["async"].tokens_per_s
                rows.append(Ratio(f"{mode} / async", kept, None, at_least=True))
    balance = {f"sync: {name}": value for name, value in sync.details().items()} | {"groups per step": groups}
    rows.append(Ratio("balance: longer / shorter of Tgen, Ttrain", sync.imbalance, BALANCE, details=balance))
    return [*rows, tail_row(lengths)]


def tail_row(lengths: Sequence[int]) -> Ratio:
    """Return the row of the tail of the lengths."""
    median, tail = quantile(lengths, 0.5), quantile(lengths, 0.99)
    details = {"responses": len(lengths), "median": median, "p99": tail, "max": max(lengths)}
    return Ratio("tail: p99 / median length", tail / median, TAIL, at_least=True, details=details)


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode, in turn")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run that are measured, a multiple of 4")
    parser.add_argument("--skip", type=int, default=8, help="steps that are not measured, at the start of a run")
    parser.add_argument("--groups", type=int, default=20, help="groups per step at which the calibration starts")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps, options.skip, options.groups = 1, 4, 1, 2
    with tempfile.TemporaryDirectory(prefix="async-vs-sync-") as name:
        directory = (options.keep or Path(name)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        size = {"hidden": 128, "layers": 2} if options.quick else {"hidden": 320, "layers": 4}
        parameters = write_model(directory / "model", CLASSES, **size)
        print(f"model: {parameters} parameters")
        write_prompts(directory / "prompts.jsonl", CLASSES, 2000)
        # Refuses a number of steps that cannot be measured before anything runs.
        steps_after(run_config(options, directory, "async", options.groups, options.steps), options.steps)
        groups = options.groups if options.quick else calibrate(options, directory)
        windows: dict[str, list[Window]] = {mode: [] for mode in MODES}
        lengths: list[int] = []
        for _ in range(options.rounds):
            for mode, measured in windows.items():
                window, found = run_mode(mode, options, directory, groups, options.steps, options.skip)
                measured.append(window)
                lengths += found
    return finish(rows_of(windows, lengths, groups), options)


if __name__ == "__main__":
    sys.exit(main())
