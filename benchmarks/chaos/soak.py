"""The soak: the quickstart's task under faults that come from outside, against the same run without them.

    python -m benchmarks.chaos.soak [--minutes 20] [--seed N] [--fault-seed N] [--faults NAMES] [--json FILE] [--quick]

Both runs are asynchronous, and have the same seed and two engines, or one. In the second run faults happen, drawn from
a table (benchmarks/chaos/kinds.py) by a seed that is printed; docs/benchmarks.md says what each is and what the run
must do. Reward functions do not answer in time now and then (benchmarks/chaos/orders.py). What a kind needs in the
config, both runs have.

Rows, for both runs where it makes sense:

- each check of benchmarks/lib/accounting.py, an independent script over the run's files: its number of problems, and
  the oldest token that was trained over the bound;
- the planned faults that were survived at the price that their kind allows; replicas replaced, and none without a
  loss; responses that another engine has continued, for each busy replica that was lost; time-outs counted against
  late rewards; skipped steps that no fault explains;
- final accuracy, greedy and sampled: the difference to the undisturbed run in points;
- the time of all this over `--minutes`. A run that does not end in time is killed and reported. It takes 20 minutes at
  most; --quick, with two faults, about five.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.chaos.kinds import KINDS, Fault, draw, schedule
from benchmarks.chaos.rows import REPLICAS, rows_of
from benchmarks.chaos.run import run_once
from benchmarks.lib.file_faults import why_no_handles
from benchmarks.lib.report import ROOT, finish, new_parser
from benchmarks.lib.whole_run import make_assets

FIRST_STEP = 3  # before the first fault: engines are warm, the queue is full
LATE_SHARE = 0.005  # of the different answers, whose reward times out
QUIET_END = 10  # steps after the last fault, in which a replica can still be replaced
ONE_ENGINE_SHARE = 0.25  # of the soaks whose faults are drawn, that have one engine
LAST_ONE = "this soak has one engine, which has to serve on"
QUICK_FAULTS = ["kill-engine", "pause-replica"]


def plan_faults(options: argparse.Namespace) -> list[Fault]:
    """Return the schedule of the faults that the options name or draw, and print how to have the same one again.

    It sets `options.fault_seed` and `options.replicas` if they are not given.
    """
    if options.fault_seed is None:
        options.fault_seed = random.SystemRandom().randrange(10**6)
    named = None if options.faults is None else [name for name in options.faults.split(",") if name]
    if named is None and options.quick:
        named = QUICK_FAULTS
    if options.replicas is None:
        alone = random.Random(f"soak-engines-{options.fault_seed}").random() < ONE_ENGINE_SHARE
        options.replicas = 1 if named is None and alone else REPLICAS
    impossible = {"stale-files": why_no_handles(), "crawl-engine": LAST_ONE if options.replicas == 1 else ""}
    impossible = {name: why for name, why in impossible.items() if why}
    wanted = draw(options.fault_seed, options.count, list(impossible)) if named is None else named
    last = max(FIRST_STEP + 1, options.steps - QUIET_END)
    try:
        faults = schedule(options.fault_seed, wanted, replicas=options.replicas, first=FIRST_STEP, last=last)
    except ValueError as error:
        raise SystemExit(f"--faults: {error}") from None
    for reason in dict.fromkeys(impossible.values()):
        print(f"not drawn: {', '.join(name for name, why in impossible.items() if why == reason)}: {reason}")
    faults = [fault for fault in faults if fault.kind.name not in impossible]
    names = ",".join(fault.kind.name for fault in faults)
    print(f"seed {options.seed}, --fault-seed {options.fault_seed} --replicas {options.replicas}: {names}", flush=True)
    return faults


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="the most that both runs may take together")
    parser.add_argument("--seed", type=int, default=0, help="seed of the runs")
    parser.add_argument("--fault-seed", type=int, help="seed that draws the faults and their schedule; default: random")
    parser.add_argument("--faults", help=f"faults instead of drawn ones, with commas: {', '.join(KINDS)}")
    parser.add_argument("--count", type=int, default=8, help="faults that are drawn")
    parser.add_argument("--replicas", type=int, choices=(1, 2), help="of one engine each; default: 2, or drawn")
    parser.add_argument("--steps", type=int, default=280, help="steps of each run")
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
        calm = run_once("undisturbed", options, directory, until, [], 0.0, kinds)
        disturbed = run_once("disturbed", options, directory, until, faults, LATE_SHARE, kinds)
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
