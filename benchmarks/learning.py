"""Accuracy that asynchronous training reaches on the quickstart's task, against synchronous training.

    python -m benchmarks.learning [--json FILE] [--quick]

Runs the quickstart's config (examples/rl/configs/quickstart_cpu.yaml) for each seed in two ways: as it is, and with
`admission.mode: async`, a bound on staleness of 4 updates and a publication every 4 updates, so that truncated
importance sampling is on. Nothing else differs. Each run is evaluated before and after with 8 responses per problem,
4,800 in all: the standard error of the difference of two runs is then about 0.7 points.

One row per seed and kind of sampling: what synchronous training has gained more, in points of accuracy. It may be below
0. A further row checks that the asynchronous runs were asynchronous: the largest staleness of what was trained.

It takes about ten minutes, with --quick three.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lib.report import Ratio, finish, new_parser
from benchmarks.lib.whole_run import QUICKSTART, fresh, make_assets, train

POINTS = 3.0
STALENESS = 4
SAMPLES = 8
KINDS = ("greedy", "sampled")
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "async": {"mode": "async", "max_staleness": STALENESS, "sync_interval": 4},
}


@dataclass(frozen=True)
class LearningResult:
    """Accuracies of a run, from 0 to 1, before and after, by kind of sampling; the largest staleness it trained."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    staleness: float
    wall_s: float


def run_config(assets: Path, run_dir: Path, mode: str, seed: int, steps: int | None) -> dict[str, Any]:
    """Return the quickstart's config with a mode, a seed and the paths of `assets`."""
    config: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    config["run"] |= {"dir": str(run_dir), "seed": seed, "export": False} | ({"steps": steps} if steps else {})
    config["model"]["path"] = str(assets / "model")
    config["data"]["path"] = str(assets / "train.jsonl")
    config["evaluation"]["sets"][0]["path"] = str(assets / "heldout.jsonl")
    config["evaluation"]["sampling"]["samples"] = SAMPLES
    config["admission"] = MODES[mode]
    return config


def run(assets: Path, directory: Path, mode: str, seed: int, steps: int | None, timeout_s: float) -> LearningResult:
    """Train with one mode and seed; return the outcome."""
    run_dir = fresh(directory, f"{mode}-{seed}")
    config = run_config(assets, run_dir, mode, seed, steps)
    records = train(config, ranks=config["trainer"]["gpus"], timeout_s=timeout_s)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    outcome = LearningResult(
        before={kind: summary["eval_before"][kind] for kind in KINDS},
        after={kind: summary["eval_after"][kind] for kind in KINDS},
        staleness=max(record.get("batch/staleness_max", 0.0) for record in records),
        wall_s=records[-1]["total/wall_seconds"],
    )
    print(
        f"seed {seed}, {mode}: sampled {outcome.before['sampled']:.1%} -> {outcome.after['sampled']:.1%}, greedy "
        f"{outcome.before['greedy']:.1%} -> {outcome.after['greedy']:.1%}, staleness up to {outcome.staleness:.0f}, "
        f"{outcome.wall_s:.0f} s"
    )
    return outcome


def rows_of(outcomes: Mapping[str, Sequence[LearningResult]], seeds: Sequence[int]) -> list[Ratio]:
    """Return the rows of the report; `outcomes`: by mode, one for each seed."""
    rows = []
    for seed, sync, ahead in zip(seeds, outcomes["sync"], outcomes["async"], strict=True):
        for kind in KINDS:
            details = {
                f"{mode}: before, after": f"{each.before[kind]:.4f}, {each.after[kind]:.4f}"
                for mode, each in (("sync", sync), ("async", ahead))
            }
            points = 100 * (sync.after[kind] - ahead.after[kind])
            rows.append(Ratio(f"seed {seed}, {kind}: sync - async, points", points, POINTS, details=details))
    # Each asynchronous run has trained what is older than what the updates between two publications explain.
    least = min(each.staleness for each in outcomes["async"])
    rows.append(Ratio("largest staleness trained, least of the async runs", least, STALENESS, at_least=True))
    most = max(each.staleness for each in outcomes["async"])
    rows.append(Ratio(f"largest staleness trained / {STALENESS}", most / STALENESS, 1.0))
    return rows


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--assets", type=Path, help="those of `make quickstart`; made anew if not given")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that one run may take")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parser.parse_args()
    steps = None
    if options.quick:
        options.seeds, steps = options.seeds[:1], 3
    with tempfile.TemporaryDirectory(prefix="learning-") as name:
        directory = (options.keep or Path(name)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        assets = (options.assets or directory / "assets").resolve()
        if options.assets is None:
            make_assets(assets)
        outcomes: dict[str, list[LearningResult]] = {mode: [] for mode in MODES}
        for seed in options.seeds:
            for mode, measured in outcomes.items():
                measured.append(run(assets, directory, mode, seed, steps, options.timeout))
    return finish(rows_of(outcomes, options.seeds), options)


if __name__ == "__main__":
    sys.exit(main())
