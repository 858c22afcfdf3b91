"""A run of the soak: its config, its job, which the same command starts again as a user would, and what it has done."""

import argparse
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.chaos.injector import Injector
from benchmarks.chaos.kinds import Fault, Kind
from benchmarks.chaos.orders import LATE, taken
from benchmarks.chaos.processes import processes_left
from benchmarks.chaos.rows import STALENESS, SoakOutcome
from benchmarks.chaos.watch import orders_of
from benchmarks.lib.accounting import check_run
from benchmarks.lib.file_faults import preloading
from benchmarks.lib.recount import UnreadableRun
from benchmarks.lib.whole_run import QUICKSTART, environment, run_command, step_records, torchrun
from megarl.checkpoint.save.history import ROLLED_BACK
from megarl.common.rundir.rotating_lines import read_lines

AGENT_WORKERS = 2
GROUPS = 24  # of a step
LEAST_SKIPPED = 2  # steps, at every start of the run
LEAVE_S = 60.0  # for the processes of a job that has ended, before it is started again


@dataclass(frozen=True)
class Tempo:
    """The time limits for silent parts of a run: engines, and publications, in which an engine may be silent."""

    rpc_s: float = 20.0
    weight_sync_s: float = 40.0


REWARD_TIMEOUT_S = 3.0
REPORT_S = 0.5  # between reports of engines: short, so that lost responses go on from their middle
LEAST_S = 30.0  # no run is started with less time left
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
) -> ConfigTree:
    """Return the quickstart's config with the changes of the soak.

    `late_share`: of the answers, see chaos/orders.py. `kinds`: of the faults that shall be able to happen.
    """
    config: ConfigTree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    orders = {"orders": str(orders_of(run_dir))}
    late = {"share": late_share, "seed": options.seed, "sleep_s": 30 * REWARD_TIMEOUT_S}
    heldout = {"name": "additions", "path": str(options.assets / "heldout.jsonl"), "reward": {"function": "math"}}
    changes: ConfigTree = {
        "run": {"name": "soak", "dir": str(run_dir), "seed": options.seed, "steps": options.steps, "export": False},
        "model": {"path": str(options.assets / "model")},
        "batch": {"groups": GROUPS},
        "data": {"path": str(options.assets / "train.jsonl")},
        "reward": {
            "function": "benchmarks.chaos.orders:late_math",
            "kwargs": late | orders,
            "workers": 2,
            "timeout_s": REWARD_TIMEOUT_S,
        },
        "evaluation": {"sets": [heldout | ({"limit": 100} if options.quick else {})]},
        "admission": {"mode": "async", "sync_interval": 2, "max_staleness": STALENESS},
        "rollout": {
            "replicas": options.replicas,
            "max_replicas": options.replicas + 1,
            "report_interval_s": REPORT_S,
            "agent_workers": AGENT_WORKERS if any(kind.target == "agent-worker" for kind in kinds) else 0,
        },
        "agent": {"loop": "benchmarks.chaos.hooks:OrderedTurn", "kwargs": orders},
        "algorithm": {"loss": "benchmarks.chaos.hooks:ordered_ppo", "loss_options": orders},
        "trainer": {"max_skipped_steps": max(LEAST_SKIPPED, sum(kind.action == "spoil" for kind in kinds))},
        "weight_sync": {"restarts": 3},
        "checkpoint": {"every": SAVE_EVERY},
        "telemetry": {"dump_batches": True, "tensorboard": False},
        "timeouts": {
            "rpc_s": tempo.rpc_s,
            "weight_sync_s": tempo.weight_sync_s,
            "engine_start_s": 300.0,
            "generate_s": 300.0,
            "save_s": COLLECTIVE_S,
        },
    }
    return {name: config.get(name, {}) | changes.get(name, {}) for name in config | changes}


def run_once(
    name: str,
    options: argparse.Namespace,
    directory: Path,
    until: float,
    faults: Sequence[Fault],
    late_share: float,
    kinds: Collection[Kind],
    tempo: Tempo = SOAK_TEMPO,
) -> SoakOutcome:
    """Make one run with its faults and count it. A failure, or `until` passing, is part of the outcome.

    `kinds`: those of the faults of all runs that are compared, see `run_config`.
    """
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
    injector = Injector(run_dir, faults, replicas=options.replicas, say=say)
    restarts = sum(fault.kind.restarts for fault in faults)
    starts, stale = sum(fault.kind.starts for fault in faults), any(fault.kind.target == "files" for fault in faults)
    try:
        outcome.records = run_job(
            run_config(options, run_dir, late_share, kinds, tempo),
            restarts=restarts,
            starts=starts,
            until=until,
            say=say,
            variables=preloading(run_dir, orders_of(run_dir)) if stale else {},
        )
    except SystemExit as error:
        outcome.failure = str(error)
        say(f"FAILED: {outcome.failure}")
    finally:
        problem = injector.stop()
    outcome.happened, outcome.late_rewards = injector.happened, len(taken(orders_of(run_dir), LATE))
    outcome.left = processes_left(run_dir, LEAVE_S)
    discarded = map(json.loads, read_lines(run_dir / ROLLED_BACK))
    outcome.rolled_back = [each for each in discarded if each["file"] == "metrics.jsonl" and "time/step" in each]
    note_effects(outcome)
    if not outcome.failure:
        outcome.summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        count(outcome, run_dir)
    outcome.failure = "; ".join(filter(None, (outcome.failure, problem)))
    say(f"ended after {len(outcome.records)} steps")
    return outcome


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


def run_job(
    config: dict[str, Any],
    *,
    restarts: int,
    starts: int,
    until: float,
    say: Callable[[str], None],
    variables: Mapping[str, str],
) -> list[dict[str, Any]]:
    """Run a config to its end and return its steps; torchrun may restart the ranks, and this function the job.

    `starts`: the most starts after the first one. `variables`: added to the environment.

    Raises SystemExit with the end of the output if that is not enough, if a job that has ended leaves processes behind,
    or when `time.monotonic()` is `until`.
    """
    directory = Path(config["run"]["dir"])
    path, log = directory.with_suffix(".yaml"), directory.with_suffix(".log")
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = torchrun(path, ranks=2, restarts=restarts)
    for start in range(starts + 1):
        code = run_command(command, log, max(0.0, until - time.monotonic()), {**environment(), **variables})
        if code == 0 and _status(directory) != "preempted":  # a stop request may have ended it before its last step
            return step_records(directory)
        tail = log.read_text(errors="replace")[-3000:]
        if left := processes_left(directory, min(LEAVE_S, max(0.0, until - time.monotonic()))):
            raise SystemExit(f"{directory.name} ended with code {code} and left {', '.join(left)}:\n{tail}")
        if start < starts:
            say(f"the job has ended with code {code}, left no process, and is started again")
    raise SystemExit(f"{directory.name} failed:\n{tail}")


def _status(directory: Path) -> str:
    """Return how a run says that it has ended; "" if it does not."""
    path = directory / "exit.json"
    return str(json.loads(path.read_text(encoding="utf-8"))["status"]) if path.is_file() else ""
