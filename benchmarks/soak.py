#!/usr/bin/env python3
"""The soak: the quickstart's task under faults that come from outside, against the same run without them.

    python benchmarks/soak.py [--minutes 20] [--seed N] [--fault-seed N] [--faults NAMES] [--json FILE] [--quick]

Both runs are asynchronous, and have the same seed and two engines, or one. In the second run faults happen, drawn from
a table (benchmarks/soak_kinds.py) by a seed that is printed: parts of the run are killed, stopped for longer than the
run takes them for alive, stopped for a few seconds or slowed down; replicas are drained, removed and added; torchrun,
or all of the job, is killed or asked to stop, and the same command starts it again; the disk of the run directory or of
the checkpoints is full for a while, or file handles are stale; a gradient or a log-prob is NaN. Some faults must end
the run, which says why, and is started again when their cause has gone: a disk stays full, gradients stay NaN, the time
limit comes in the final evaluation. Reward functions do not answer in time (benchmarks/soak_reward.py), fork or flood.
What a kind of fault needs in the config, as agent workers, both runs have (benchmarks/soak_variant.py). A fault is told
when it happens, and what the run did about it.

Rows, for both runs where it makes sense:

- each check of benchmarks/soak_accounting.py, an independent script over the run's files: its number of problems, and
  the oldest token that was trained over the bound;
- the planned faults that happened, were noticed and were survived, at the price that their kind allows; replaced
  replicas, and none replaced without a loss; responses that another engine has continued, for each busy replica that
  was lost; as many time-outs counted as rewards were late;
- steps that were skipped for a number that is not finite, without a fault that explains it;
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "benchmarks"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import yaml  # noqa: E402
from report import add_options, finish  # noqa: E402
from soak_accounting import check_run  # noqa: E402
from soak_disk import small_disk  # noqa: E402
from soak_faults import Injector  # noqa: E402
from soak_hosts import Hosts  # noqa: E402
from soak_job import run_job  # noqa: E402
from soak_kinds import KINDS, Fault, Kind  # noqa: E402
from soak_place import OneMachine, RunPlace, SeveralHosts  # noqa: E402
from soak_plan import plan_faults  # noqa: E402
from soak_problems import UnreadableRun  # noqa: E402
from soak_processes import processes_left  # noqa: E402
from soak_reward import marked  # noqa: E402
from soak_rows import STALENESS, SoakOutcome, rows_of  # noqa: E402
from soak_stale import preloading  # noqa: E402
from soak_starts import start_seconds  # noqa: E402
from soak_variant import Tempo, changes_for, checkpoints_of, evaluation_reward, orders_of  # noqa: E402
from whole_run import environment  # noqa: E402

from megarl.checkpoint.save.history import ROLLED_BACK  # noqa: E402
from megarl.common.line_parts import read_lines  # noqa: E402

QUICKSTART = ROOT / "examples" / "rl" / "configs" / "quickstart_cpu.yaml"
REWARD_TIMEOUT_S = 3.0
REPORT_S = 0.5  # between reports of engines: short, so that lost responses go on from their middle
LEAST_S = 30.0  # no run is started with less time left
LEAVE_S = 60.0  # for the processes of a run that has ended, or was killed
RESTARTS = 5  # of the ranks by torchrun at most: a full disk would use up any number
SAVE_EVERY = 5  # steps: as many are lost at most when the ranks or the job are started again
COLLECTIVE_S = 120.0  # after which a rank takes another one that is stopped for lost
SOAK_TEMPO = Tempo()

ConfigTree = dict[str, dict[str, Any]]


def run_config(
    options: argparse.Namespace,
    run_dir: Path,
    late_share: float,
    kinds: Collection[Kind] = (),
    tempo: Tempo = SOAK_TEMPO,
    place: ConfigTree | None = None,
) -> ConfigTree:
    """Return the quickstart's config with the changes of the soak.

    `late_share`: of the answers, see soak_reward.py. `kinds`: of the faults that shall be able to happen. `place`: what
    the place of the run changes, see soak_place.py.
    """
    config: ConfigTree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    late = {"share": late_share, "seed": options.seed, "sleep_s": 30 * REWARD_TIMEOUT_S, "marks": str(marks(run_dir))}
    late["orders"] = str(orders_of(run_dir))
    heldout: dict[str, Any] = {"name": "additions", "path": str(options.assets / "heldout.jsonl")}
    heldout["reward"] = evaluation_reward(kinds, run_dir)
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
        "rollout": {"replicas": options.replicas, "report_interval_s": REPORT_S},
        "weight_sync": {"restarts": 3},
        "checkpoint": {"every": SAVE_EVERY},
        "telemetry": {"dump_batches": True, "tensorboard": False},
        "timeouts": {
            "rpc_s": tempo.rpc_s,
            "weight_sync_s": tempo.weight_sync_s,
            "engine_start_s": 300.0,
            "generate_s": 300.0,
            "collective_s": COLLECTIVE_S,
        },
    }
    layers = [config, changes, changes_for(kinds, run_dir, options.replicas, tempo), place or {}]
    merged: ConfigTree = {}
    for layer in layers:
        for name, section in layer.items():
            merged[name] = merged.get(name, {}) | section
    return merged


def marks(run_dir: Path) -> Path:
    """Return the file in which the reward function notes the samples that are late."""
    return run_dir.with_suffix(".late")


def run_once(
    name: str,
    options: argparse.Namespace,
    directory: Path,
    until: float,
    faults: Sequence[Fault],
    late_share: float,
    kinds: Collection[Kind] | None = None,
    tempo: Tempo = SOAK_TEMPO,
    place: RunPlace | None = None,
) -> SoakOutcome:
    """Make one run with its faults and count it. A failure, or `until` passing, is part of the outcome.

    `kinds`: those of the faults of all runs that are compared, see `run_config`; None: those of its own. `place`: where
    it runs; None: on this machine.
    """
    place = place or OneMachine()
    kinds = [fault.kind for fault in faults] if kinds is None else kinds
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
    injector = Injector(run_dir, faults, replicas=options.replicas, say=say, slower=tempo.slower, place=place)
    restarts = min(sum(fault.kind.restarts for fault in faults), RESTARTS)
    starts = sum(fault.kind.starts for fault in faults)
    try:
        outcome.records = run_job(
            run_config(options, run_dir, late_share, kinds, tempo, place.changes(restarts)),
            ranks=2, restarts=restarts, starts=starts,
            timeout_s=until - time.monotonic(), say=say, variables=variables_for(run_dir, faults),
            ended=injector.ends.ended, place=place,
        )  # fmt: skip
    except SystemExit as error:
        outcome.failure = str(error)
        say(f"FAILED: {outcome.failure}")
    finally:
        problem = injector.stop()
    outcome.happened, outcome.late_rewards = injector.happened, marked(marks(run_dir))
    outcome.engine_start_s = injector.engine_start_s
    outcome.left = processes_left(run_dir, LEAVE_S)
    outcome.rolled_back = read_rolled_back(run_dir)
    note_effects(outcome)
    for event in outcome.happened:
        event.start_s = start_seconds(run_dir, event.new_pid, event.new_since)
    if not outcome.failure:
        outcome.summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        count(outcome, run_dir)
    outcome.failure = "; ".join(filter(None, (outcome.failure, problem)))
    say(f"ended after {len(outcome.records)} steps")
    return outcome


def variables_for(run_dir: Path, faults: Sequence[Fault]) -> dict[str, str]:
    """Return the environment that the faults need in the processes of a run."""
    stale = any(fault.kind.target == "files" for fault in faults)
    return preloading(run_dir, orders_of(run_dir)) if stale else {}


def read_rolled_back(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of steps that a resume has discarded."""
    records = map(json.loads, read_lines(run_dir / ROLLED_BACK))
    return [record for record in records if record["file"] == "metrics.jsonl" and "time/step" in record]


def note_effects(outcome: SoakOutcome) -> None:
    """Note for each fault what there was until the next one: restarted replicas, responses continued elsewhere.

    What was seen when it was over counts too, because a later fault may have made these steps be made again. To a fault
    after which a resume has gone back belong the steps from there on.
    """
    steps = [each.step for each in outcome.happened] + [len(outcome.records)]
    for event, end in zip(outcome.happened, steps[1:], strict=True):
        records = outcome.records[event.step - event.redone_steps : end]
        continued = int(sum(record.get("rollout/continued") or 0.0 for record in records))
        restarted = int(sum(record.get("sync/restarted_replicas") or 0.0 for record in records))
        event.continued, event.restarted = max(event.continued, continued), max(event.restarted, restarted)
        event.notes.append(f"{event.continued} responses continued elsewhere")


def count(outcome: SoakOutcome, run_dir: Path) -> None:
    """Check the files of a run that has ended."""
    try:
        outcome.report = check_run(run_dir)
    except (UnreadableRun, KeyError) as error:
        outcome.failure = f"the files of the run cannot be checked: {error!r}"
        return
    print("\n".join(outcome.report.lines()), flush=True)


def make_assets(directory: Path) -> None:
    """Make the quickstart's data and model, unless they are there."""
    command = [sys.executable, "-m", "megarl.quickstart", "--out", str(directory)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), timeout=600, check=False)
    if ended.returncode:
        raise SystemExit(f"the quickstart's data and model could not be made in {directory}")


@contextmanager
def place_of(kinds: Collection[Kind]) -> Iterator[RunPlace]:
    """Yield where both runs are: on several hosts if a fault needs them."""
    if not any(kind.needs_hosts for kind in kinds):
        yield OneMachine()
        return
    with tempfile.TemporaryDirectory(prefix="soak-hosts-") as directory:
        hosts = Hosts(SeveralHosts.COUNT, Path(directory))
        try:
            hosts.open()
            yield SeveralHosts(hosts)
        finally:
            hosts.close()


@contextmanager
def disks_of(run_dir: Path, kinds: Collection[Kind]) -> Iterator[None]:
    """Give a run directory, or that of its checkpoints, a file system of its own if a fault fills its disk."""
    targets = {kind.target for kind in kinds}
    with ExitStack() as disks:
        if "disk" in targets:
            disks.enter_context(small_disk(run_dir))
        if "checkpoint-disk" in targets:
            disks.enter_context(small_disk(checkpoints_of(run_dir, kinds)))
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--minutes", type=float, default=20.0, help="the most that both runs may take together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs")
    parser.add_argument("--fault-seed", type=int, help="seed that draws the faults and their schedule; default: random")
    parser.add_argument("--faults", help=f"faults instead of drawn ones, with commas: {', '.join(KINDS)}")
    parser.add_argument(
        "--replicas",
        type=int,
        choices=(1, 2),
        help="replicas, of one engine each; default: 2, or drawn with the faults",
    )
    parser.add_argument("--steps", type=int, default=280, help="steps of each run")
    parser.add_argument("--groups", type=int, default=24, help="prompt groups of a step")
    parser.add_argument(
        "--late", type=float, default=0.005, help="share of the different answers whose reward times out"
    )
    parser.add_argument("--assets", type=Path, default=ROOT / "runs" / "quickstart" / "assets", help="made if missing")
    parser.add_argument("--keep", type=Path, help="keep the runs in this directory, which must be new or empty")
    options = parser.parse_args()
    if options.quick:
        options.steps = min(options.steps, 24)
    options.assets = options.assets.resolve()
    faults = plan_faults(options)
    begun = time.monotonic()
    make_assets(options.assets)
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        directory = (options.keep or Path(name)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SystemExit(f"{directory} is not empty: give --keep a new directory")
        until = begun + 60.0 * options.minutes
        kinds = [fault.kind for fault in faults]
        with place_of(kinds) as place:
            calm = run_once("undisturbed", options, directory, until, [], 0.0, kinds, place=place)
            with disks_of(directory / "disturbed", kinds):
                disturbed = run_once("disturbed", options, directory, until, faults, options.late, kinds, place=place)
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
