"""What megarl learns without a GPU: short runs of the two small tasks in each mode, and a run under faults.

    python -m benchmarks.learning [--only modes,agents,recovery] [--seeds 0,1,2] [--json FILE] [--quick]

- modes: the quickstart's task, smaller steps, in each mode of `admission`, and asynchronously at three bounds of
  staleness with and without the default correction (`MODES`);
- agents: the task of `make agents` with its calculator and without a tool (`AGENTS`);
- recovery: the soak's run (benchmarks/chaos) with two engines under `FAULTS`, one after another. A busy machine needs a
  longer `--rpc-s`: a part may be silent there without being lost.

The numbers of each run are added to `--results`, from which docs/results.md and its pictures are made (`make docs`). A
run whose numbers are there is not made again, so an interrupted matrix goes on. Rows: held-out accuracy after training
over accuracy before, for each run; seconds until the run had recovered over the time of a step, for each fault.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chaos.kinds import missing, schedule
from benchmarks.chaos.run import SAVE_EVERY, Tempo, run_once
from benchmarks.lib.learning_results import RESULTS, Fault, LearningRun, Recovery, Results
from benchmarks.lib.report import ROOT, Ratio, finish, new_parser
from benchmarks.lib.whole_run import ASSETS_S, QUICKSTART, environment, fresh, train

AGENTS_CONFIG = QUICKSTART.with_name("agents_cpu.yaml")
RUN_S = 1500.0
GROUPS, STEPS, HELD_OUT = 24, 24, 300
FAULTS = "kill-engine,hang-engine,kill-controller,kill-rank,kill-job"
NO_CORRECTION = {"algorithm": {"correction": {"kind": "none"}}}

# The sections in which runs differ. `sync_interval: 1`: only the bound of staleness differs between asynchronous runs.
MODES: dict[str, dict[str, Any]] = {
    "sync": {"admission": {"mode": "sync"}},
    "one step off": {"admission": {"mode": "one_step_off"}},
    "stream": {"admission": {"mode": "stream"}},
}
for _bound in (1, 4, 8):
    _admission = {"admission": {"mode": "async", "sync_interval": 1, "max_staleness": _bound}}
    MODES |= {f"async {_bound}": _admission, f"async {_bound} uncorrected": _admission | NO_CORRECTION}
# `require_box`: `math` also takes a product of numbers, such as the expression of a call, for its value.
BOXED = {"reward": {"function": "math", "kwargs": {"require_box": True}}}
AGENTS: dict[str, dict[str, Any]] = {
    "with the calculator": BOXED,
    "without a tool": BOXED | {"tools": [], "agent": {"loop": "single_turn", "max_turns": None, "max_tool_calls": 32}},
}


def assets(task: str) -> Path:
    """Return the directory of a task's data and model, made if missing. Raises SystemExit if that fails."""
    directory = ROOT / "runs" / ("agents" if task == "calculator" else "quickstart") / "assets"
    command = [sys.executable, "-m", "examples.quickstart", "--task", task, "--out", str(directory)]
    if subprocess.run(command, cwd=ROOT, env=environment(), timeout=3 * ASSETS_S, check=False).returncode:
        raise SystemExit(f"data and model could not be made in {directory}")
    return directory


def run_config(task: str, changes: dict[str, Any], seed: int, quick: bool) -> dict[str, Any]:
    """Return the config of a run: that of the task with fewer samples per step, one rank, and `changes`."""
    source, made = AGENTS_CONFIG if task == "calculator" else QUICKSTART, assets(task)
    held_out = {"name": "heldout", "path": str(made / "heldout.jsonl"), "limit": 20 if quick else HELD_OUT}
    config = yaml.safe_load(source.read_text(encoding="utf-8"))
    common: dict[str, Any] = {
        "run": {"name": "learning", "seed": seed, "steps": 2 if quick else STEPS, "export": False},
        "model": {"path": str(made / "model")},
        "data": {"path": str(made / "train.jsonl")},
        "trainer": {"gpus": 1, "parallel": {"tensor": 1}},
        "batch": {"groups": 4 if quick else GROUPS},
        "evaluation": {"sets": [held_out], "sampling": {"temperature": 1.0, "samples": 1}},
        "telemetry": {"tensorboard": False},
    }
    for section, fields in [*common.items(), *changes.items()]:
        config[section] = config.get(section, {}) | fields if isinstance(fields, dict) else fields
    return dict(config)


def learn(task: str, name: str, changes: dict[str, Any], seed: int, options: argparse.Namespace) -> LearningRun:
    """Make one run; return what is kept of it."""
    config = run_config(task, changes, seed, options.quick)
    run_dir = fresh(options.keep, f"{task}-{name}-{seed}".replace(" ", "-"))
    config["run"]["dir"] = str(run_dir)
    begun = time.monotonic()
    train(config, timeout_s=RUN_S)
    return LearningRun.of(run_dir, task, name, seed, time.monotonic() - begun)


def recover(options: argparse.Namespace) -> Recovery:
    """Make the soak's run under `--faults`; return its steps and faults on one clock.

    Raises SystemExit if it fails, or is not over every fault: only a whole time line is kept.
    """
    soak = argparse.Namespace(seed=0, steps=options.recovery_steps, replicas=2, quick=True, assets=assets("additions"))
    wanted, tempo = options.faults.split(","), Tempo(options.rpc_s, 2 * options.rpc_s)
    least_s = 2 * tempo.weight_sync_s  # what is shorter than the silence that is allowed loses nothing
    faults = [
        replace(fault, seconds=max(fault.seconds, least_s)) if fault.kind.action == "hang" else fault
        for fault in schedule(0, wanted, replicas=2, first=SAVE_EVERY + 2, last=soak.steps - 10)
    ]
    until = time.monotonic() + 2 * RUN_S
    directory = fresh(options.keep, "recovery")
    directory.mkdir(parents=True)
    started = time.time()  # the injector's clock begins with the run
    outcome = run_once("recovery", soak, directory, until, faults, 0.0, [each.kind for each in faults], tempo)
    over = [each for each in outcome.happened if each.over]
    failure = outcome.failure or ", ".join(missing(faults, [each.fault for each in over]))
    if failure:
        raise SystemExit(f"the run under faults has failed, or is not over them: {failure}")
    begun = min(record["wall_time"] for record in (*outcome.records, *outcome.rolled_back))
    return Recovery(
        rpc_s=options.rpc_s,
        steps=[round(record["wall_time"] - begun, 1) for record in outcome.records],
        redone=[round(record["wall_time"] - begun, 1) for record in outcome.rolled_back],
        rewards=[round(record["reward/mean"], 3) for record in outcome.records],
        faults=[
            Fault(
                name=each.fault.kind.name,
                at_s=round(started + each.at_s - begun, 1),
                recovered_s=round(each.recovered_s, 1),
                redone_steps=each.redone_steps,
            )
            for each in over
        ],
    )


def rows_of(results: Results) -> list[Ratio]:
    """Return the rows of the report."""
    rows = []
    for run in results.runs:
        details = {"before": run.before.greedy, "after": run.after.greedy, "seconds": run.seconds}
        name = f"{run.task}, {run.name}, seed {run.seed}: greedy accuracy, after / before"
        rows.append(Ratio(name, run.after.greedy / max(run.before.greedy, 1 / run.before.problems), details=details))
    if results.recovery is not None:
        times = results.recovery.steps
        step = statistics.median(after - before for before, after in itertools.pairwise(times))
        for fault in results.recovery.faults:
            details = {"recovered after, s": fault.recovered_s, "step, s": round(step, 2)}
            rows.append(Ratio(f"recovery, {fault.name}: time / step", fault.recovered_s / step, details=details))
    return rows


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--only", default="modes,agents,recovery", help="parts, with commas (%(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="with commas (%(default)s); each seed's runs before the next")
    parser.add_argument("--runs", help="of modes and agents, with commas; default: all")
    parser.add_argument("--faults", default=FAULTS, help="of the recovery, with commas (%(default)s)")
    parser.add_argument("--rpc-s", type=float, default=20.0, help="silence after which a part is lost (%(default)s)")
    parser.add_argument("--recovery-steps", type=int, default=80, help="steps of the recovery (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the kept numbers (%(default)s)")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="learning-", ignore_cleanup_errors=True) as name:
        options.keep = (options.keep or Path(name)).resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
        if options.quick:
            options.seeds, options.results, options.only = "0", Path(name) / "results.json", "modes"
        parts = options.only.split(",")
        cells = [("modes", "additions", MODES), ("agents", "calculator", AGENTS)]
        for seed in map(int, options.seeds.split(",")):
            for part, task, runs in cells:
                wanted = options.runs.split(",") if options.runs else list(runs)[: 1 if options.quick else None]
                for cell in wanted if part in parts else ():
                    if not Results.read(options.results).has(task, cell, seed):
                        run = learn(task, cell, runs[cell], seed, options)
                        Results.add(options.results, run)
                        print(f"{task}, {cell}, seed {seed}: {run.after.greedy:.3f} in {run.seconds} s", flush=True)
        if "recovery" in parts and Results.read(options.results).recovery is None:
            Results.add(options.results, recover(options))
        return finish(rows_of(Results.read(options.results)), options)


if __name__ == "__main__":
    sys.exit(main())
