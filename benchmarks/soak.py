#!/usr/bin/env python3
"""The soak: the quickstart's task under faults that come from outside, against the same run without them.

    python benchmarks/soak.py [--minutes 20] [--seed N] [--json FILE] [--quick]

Both runs are asynchronous, have two engines and the same seed. In the second one, by a random schedule that depends on
the seed alone (benchmarks/soak_faults.py): the engine process, or the actor of a replica, is killed; it is stopped for
longer than the run takes it for alive; it is stopped for a few seconds; it is slow for a while; and reward functions
do not answer in time (benchmarks/soak_reward.py). A fault is told when it happens, and what the run did about it.

Rows, for both runs where it makes sense:

- each check of benchmarks/soak_accounting.py, an independent script over the run's files: its number of problems, and
  the oldest token that was trained over the bound;
- the planned faults that happened, were noticed and were survived: replaced replicas, and none replaced without a
  loss; responses that another engine has continued, for each busy replica that was lost; as many time-outs counted as
  rewards were late;
- final accuracy, greedy and sampled: the difference to the undisturbed run in points;
- the time of all this over `--minutes`. A run that does not end in time is killed and reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import yaml  # noqa: E402
from report import Ratio, add_options, finish  # noqa: E402
from soak_accounting import check_run  # noqa: E402
from soak_faults import Fault, FaultTarget, Happened, Injector, lethal, missing, processes_left, schedule  # noqa: E402
from soak_problems import AccountingReport, UnreadableRun  # noqa: E402
from soak_reward import marked  # noqa: E402
from whole_run import environment, train  # noqa: E402

QUICKSTART = ROOT / "examples" / "rl" / "configs" / "quickstart_cpu.yaml"
POINTS = 3.0  # of accuracy, that the disturbed run may differ
REPLICAS, STALENESS = 2, 4
REWARD_TIMEOUT_S = 3.0
REPORT_S = 0.5  # between reports of engines: short, so that lost responses go on from their middle
FIRST_STEP = 3  # before the first fault: engines are warm, the queue is full
LEAST_S = 30.0  # no run is started with less time left
LEAVE_S = 60.0  # for the processes of a run that has ended, or was killed
QUIET_END = 10  # steps after the last fault, in which a replica can still be replaced
# Each fault of the full soak, by kind and target.
FAULTS: list[tuple[str, FaultTarget]] = [
    ("kill", "engine"), ("kill", "replica"), ("hang", "engine"), ("hang", "replica"), ("pause", "engine"),
    ("pause", "replica"), ("slow", "engine"), ("kill", "engine"),
]  # fmt: skip
QUICK_FAULTS: list[tuple[str, FaultTarget]] = [("kill", "engine"), ("pause", "replica")]

ConfigTree = dict[str, dict[str, Any]]


@dataclass
class SoakOutcome:
    """One run of the soak: its records, the independent count, and why it failed if it did."""

    name: str
    records: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    report: AccountingReport | None = None
    happened: list[Happened] = field(default_factory=list)
    late_rewards: int = 0
    left: list[str] = field(default_factory=list)
    failure: str = ""

    def total(self, metric: str) -> float:
        """Return the sum of a metric over the steps."""
        return sum(record.get(metric) or 0.0 for record in self.records)

    def accuracy(self, mode: str) -> float:
        """Return the final accuracy in points; nan if the run has none."""
        return 100.0 * float((self.summary.get("eval_after") or {}).get(mode, float("nan")))


def run_config(options: argparse.Namespace, run_dir: Path, late_share: float) -> ConfigTree:
    """Return the quickstart's config with the changes of the soak. `late_share`: of the answers, see soak_reward.py."""
    config: ConfigTree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    late = {"share": late_share, "seed": options.seed, "sleep_s": 30 * REWARD_TIMEOUT_S, "marks": str(marks(run_dir))}
    heldout = {"name": "additions", "path": str(options.assets / "heldout.jsonl"), "reward": {"function": "math"}}
    changes: ConfigTree = {
        "run": {"name": "soak", "dir": str(run_dir), "seed": options.seed, "steps": options.steps, "export": False},
        "model": {"path": str(options.assets / "model")},
        "batch": {"groups": options.groups},
        "data": {"path": str(options.assets / "train.jsonl")},
        "reward": {
            "function": "benchmarks.soak_reward:late_math",
            "kwargs": late,
            "workers": 2,
            "timeout_s": REWARD_TIMEOUT_S,
        },
        "evaluation": {"sets": [heldout | ({"limit": 100} if options.quick else {})]},
        "admission": {"mode": "async", "sync_interval": 2, "max_staleness": STALENESS},
        "rollout": {"replicas": REPLICAS, "report_interval_s": REPORT_S},
        "weight_sync": {"restarts": 3},
        "telemetry": {"dump_batches": True, "tensorboard": False},
        # rpc_s is the limit after which a silent engine counts as lost; a sync in which one is silent takes longer.
        "timeouts": {"rpc_s": 20.0, "weight_sync_s": 40.0, "engine_start_s": 300.0, "generate_s": 300.0},
    }
    return {name: config.get(name, {}) | changes.get(name, {}) for name in {**config, **changes}}


def marks(run_dir: Path) -> Path:
    """Return the file in which the reward function notes the samples that are late."""
    return run_dir.with_suffix(".late")


def run_once(
    name: str, options: argparse.Namespace, directory: Path, until: float, faults: Sequence[Fault], late_share: float
) -> SoakOutcome:
    """Make one run with its faults and count it. A failure, or `until` passing, is part of the outcome."""
    outcome = SoakOutcome(name)
    run_dir = directory / name
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{name} +{time.monotonic() - begun:.0f} s] {text}", flush=True)

    if begun > until - LEAST_S:
        outcome.failure = f"less than {LEAST_S:.0f} s were left of --minutes {options.minutes:g}"
        say(f"NOT STARTED: {outcome.failure}")
        return outcome
    say(f"{options.steps} steps, {len(faults)} faults, {late_share:.1%} of the answers late; log: {run_dir}.log")
    injector = Injector(run_dir, faults, replicas=REPLICAS, say=say)
    try:
        outcome.records = train(run_config(options, run_dir, late_share), ranks=2, timeout_s=until - time.monotonic())
    except SystemExit as error:
        outcome.failure = str(error)
        say(f"FAILED: {outcome.failure}")
    finally:
        problem = injector.stop()
    outcome.happened, outcome.late_rewards = injector.happened, marked(marks(run_dir))
    outcome.left = processes_left(run_dir, LEAVE_S)
    note_effects(outcome)
    if not outcome.failure:
        outcome.summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        count(outcome, run_dir)
    outcome.failure = "; ".join(filter(None, (outcome.failure, problem)))
    say(f"ended after {len(outcome.records)} steps")
    return outcome


def note_effects(outcome: SoakOutcome) -> None:
    """Note for each fault what there was until the next one: restarted replicas, responses continued elsewhere."""
    steps = [each.step for each in outcome.happened] + [len(outcome.records)]
    for event, end in zip(outcome.happened, steps[1:], strict=True):
        records = outcome.records[event.step : end]
        event.continued = int(sum(record.get("rollout/continued") or 0.0 for record in records))
        event.restarted = int(sum(record.get("sync/restarted_replicas") or 0.0 for record in records))
        event.notes.append(f"{event.continued} responses continued elsewhere")


def count(outcome: SoakOutcome, run_dir: Path) -> None:
    """Check the files of a run that has ended."""
    try:
        outcome.report = check_run(run_dir)
    except (UnreadableRun, KeyError) as error:
        outcome.failure = f"the files of the run cannot be checked: {error!r}"
        return
    print("\n".join(outcome.report.lines()), flush=True)


def rows_of(
    calm: SoakOutcome, disturbed: SoakOutcome, faults: Sequence[Fault], minutes: float, limit: float
) -> list[Ratio]:
    """Return the rows of the report. A run that has failed misses every bound that needs it."""
    rows = [row for outcome in (calm, disturbed) for row in (*end_rows(outcome), *accounting_rows(outcome))]
    rows += fault_rows(disturbed, faults)
    for mode in ("greedy", "sampled"):
        difference = abs(disturbed.accuracy(mode) - calm.accuracy(mode))
        values = {each.name: f"{each.accuracy(mode):.1f}%" for each in (calm, disturbed)}
        rows.append(Ratio(f"final accuracy, {mode}: difference in points", difference, POINTS, details=values))
    return [*rows, Ratio("minutes / limit", minutes / limit, 1.0, details={"minutes": round(minutes, 1)})]


def end_rows(outcome: SoakOutcome) -> list[Ratio]:
    """Return the rows that say whether a run has come to its end, and whether it has left processes behind."""
    details = {"failure": outcome.failure[-1500:]} if outcome.failure else {"steps": len(outcome.records)}
    left = {str(number): each for number, each in enumerate(outcome.left, start=1)}
    return [
        Ratio(f"{outcome.name}: ended", float(not outcome.failure), 1.0, at_least=True, details=details),
        Ratio(f"{outcome.name}: processes left", float(len(outcome.left)), 0.0, details=left),
    ]


def accounting_rows(outcome: SoakOutcome) -> list[Ratio]:
    """Return one row for each check of the accounting, and one for the oldest token."""
    report = outcome.report
    if report is None:
        return [
            Ratio(f"{outcome.name}: accounting", float("nan"), 0.0, details={"failure": "there is no run to count"})
        ]
    rows = []
    for name, found in report.problems.items():
        details = {str(number): problem for number, problem in enumerate(found[:10], start=1)}
        rows.append(Ratio(f"{outcome.name}: {name}, problems", float(len(found)), 0.0, details=details))
    ends: Mapping[str, Any] = dict(report.ends)
    counted = {"groups admitted": report.admitted, **ends}
    rows.append(Ratio(f"{outcome.name}: oldest token / bound", report.oldest / STALENESS, 1.0, details=counted))
    return rows


def fault_rows(outcome: SoakOutcome, faults: Sequence[Fault]) -> list[Ratio]:
    """Return the rows that say whether the faults happened, and whether the run has noticed them."""
    over = sum(each.over for each in outcome.happened)
    details = {str(number): str(each) for number, each in enumerate(outcome.happened, start=1)}
    if absent := missing(faults, outcome.happened):
        details["not happened, or not over"] = ", ".join(absent)
    return [
        Ratio("faults survived / planned", ratio(over, len(faults)), 1.0, at_least=True, details=details),
        *loss_rows(outcome),
        reward_row(outcome),
    ]


def loss_rows(outcome: SoakOutcome) -> list[Ratio]:
    """Return the rows that say what the loss of replicas has cost.

    A replica that is lost in the middle of a weight sync takes the others along, so one loss may restart all of them.
    """
    lost, restarted = lethal(outcome.happened), outcome.total("sync/restarted_replicas")
    explained = sum(min(REPLICAS, each.restarted) for each in lost)
    counts = {"lost": len(lost), "restarted": restarted}
    continued = [each.continued for each in lost if each.busy]
    responses = {"by each loss of a busy replica": continued, "in all": outcome.total("rollout/continued")}
    return [
        Ratio("replicas restarted / lost", ratio(restarted, len(lost)), 1.0, at_least=True, details=counts),
        Ratio("replicas restarted without a loss", restarted - explained, 0.0),
        Ratio(
            "responses continued elsewhere, least of a busy replica that was lost",
            min(continued, default=float("nan")), 1.0, at_least=True, details=responses,
        ),
    ]  # fmt: skip


def reward_row(outcome: SoakOutcome) -> Ratio:
    """Return the row that says whether the run has counted each late reward, and no other one."""
    late, counted = outcome.late_rewards, outcome.total("reward/errors")
    difference = abs(counted - late) if late else float("nan")
    details = {"late": late, "counted by the run (reward/errors)": counted}
    return Ratio("reward time-outs counted: difference to the late rewards", difference, 0.0, details=details)


def ratio(value: float, of: float) -> float:
    """Return value / of; nan, which misses every bound, if there is nothing to compare with."""
    return value / of if of else float("nan")


def make_assets(directory: Path) -> None:
    """Make the quickstart's data and model, unless they are there."""
    command = [sys.executable, "-m", "megarl.quickstart", "--out", str(directory)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), timeout=600, check=False)
    if ended.returncode:
        raise SystemExit(f"the quickstart's data and model could not be made in {directory}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--minutes", type=float, default=20.0, help="the most that both runs may take together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs and of the schedule of faults")
    parser.add_argument("--steps", type=int, default=120, help="steps of each run")
    parser.add_argument("--groups", type=int, default=24, help="prompt groups of a step")
    parser.add_argument(
        "--late", type=float, default=0.005, help="share of the different answers whose reward times out"
    )
    parser.add_argument("--assets", type=Path, default=ROOT / "runs" / "quickstart" / "assets", help="made if missing")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory, which must be new or empty")
    options = parser.parse_args()
    if options.quick:
        options.steps = 24
    options.assets = options.assets.resolve()
    wanted = QUICK_FAULTS if options.quick else FAULTS
    faults = schedule(
        options.seed, wanted, replicas=REPLICAS, first=FIRST_STEP, last=max(FIRST_STEP + 1, options.steps - QUIET_END)
    )
    begun = time.monotonic()
    make_assets(options.assets)
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        directory = (options.keep or Path(name)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SystemExit(f"{directory} is not empty: give --keep a new directory")
        until = begun + 60.0 * options.minutes
        calm = run_once("undisturbed", options, directory, until, [], 0.0)
        disturbed = run_once("disturbed", options, directory, until, faults, options.late)
        minutes = (time.monotonic() - begun) / 60.0
    rows = rows_of(calm, disturbed, faults, minutes, options.minutes)
    code = finish(rows, options)
    # What is counted must be right in a quick run too; only its accuracy and its time mean nothing.
    missed = [row.name for row in rows if not row.ok and not ("accuracy" in row.name or row.name.startswith("minutes"))]
    if options.quick and missed:
        print("missed, in spite of --quick:", "; ".join(missed))
    return code or (1 if missed else 0)


if __name__ == "__main__":
    sys.exit(main())
