"""Plans a soak: where its runs are, which faults can happen there, and which of these do."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from soak_disk import why_no_disk  # noqa: E402
from soak_hosts import why_no_hosts  # noqa: E402
from soak_kinds import KINDS, Fault, draw, schedule  # noqa: E402
from soak_rows import REPLICAS  # noqa: E402
from soak_stale import why_no_handles  # noqa: E402

FIRST_STEP = 3  # before the first fault: engines are warm, the queue is full
QUIET_END = 10  # steps after the last fault, in which a replica can still be replaced
# Of the time limit, for faults; the rest is for the undisturbed run, the starts and the steps.
FAULTS_SHARE = 0.4
HOSTS_SHARE = 0.2  # of the soaks whose faults are drawn, that are on several hosts
ONE_ENGINE_SHARE = 0.25  # of the others, that have one engine
LAST_ONE = "this soak has one engine, which has to serve on"
ALONE = "this soak is on one machine; another --fault-seed, or --faults with one of them, has it on several hosts"
TOGETHER = "this soak is on several hosts"
QUICK_FAULTS = ["kill-engine", "pause-replica"]
# The only engine is neither drained nor removed, whether by a command or because it is slow.
NEED_ANOTHER_ENGINE = ("drain-replica", "remove-replica", "crawl-engine")


def plan_faults(options: argparse.Namespace) -> list[Fault]:
    """Return the schedule of the faults that the options name or draw, and print how to have the same one again.

    It sets `options.fault_seed` and `options.replicas` if they are not given.
    """
    if options.fault_seed is None:
        options.fault_seed = random.SystemRandom().randrange(10**6)
    named = None if options.faults is None else [name for name in options.faults.split(",") if name]
    if named is None and options.quick:
        named = QUICK_FAULTS
    no_hosts = why_no_hosts() if wants_hosts(options.fault_seed, named) else ALONE
    if options.replicas is None:
        options.replicas = 1 if no_hosts and wants_one_engine(options.fault_seed, named) else REPLICAS
    impossible = why_impossible(no_hosts, options.replicas)
    seconds = FAULTS_SHARE * 60.0 * options.minutes
    wanted = draw(options.fault_seed, seconds, list(impossible)) if named is None else named
    last = max(FIRST_STEP + 1, options.steps - QUIET_END)
    try:
        faults = schedule(
            options.fault_seed, wanted, replicas=options.replicas, first=FIRST_STEP, last=last, end=options.steps
        )
    except ValueError as error:
        raise SystemExit(f"--faults: {error}") from None
    for reason in dict.fromkeys(impossible.values()):
        print(f"not drawn: {', '.join(name for name, why in impossible.items() if why == reason)}: {reason}")
    faults = [fault for fault in faults if fault.kind.name not in impossible]
    names = ",".join(fault.kind.name for fault in faults)
    print(f"seed {options.seed}, --fault-seed {options.fault_seed} --replicas {options.replicas}: {names}", flush=True)
    return faults


def wants_hosts(fault_seed: int, named: Sequence[str] | None) -> bool:
    """Tell whether the soak is to be on several hosts: if a fault that is named needs them, or else by the seed."""
    if named is not None:
        return any(name in KINDS and KINDS[name].needs_hosts for name in named)
    return random.Random(f"soak-place-{fault_seed}").random() < HOSTS_SHARE


def wants_one_engine(fault_seed: int, named: Sequence[str] | None) -> bool:
    """Tell whether a soak on one machine is to have one engine only, by the seed of drawn faults."""
    return named is None and random.Random(f"soak-engines-{fault_seed}").random() < ONE_ENGINE_SHARE


def why_impossible(no_hosts: str, replicas: int = REPLICAS) -> dict[str, str]:
    """Return the faults that cannot happen here, with the reasons.

    `no_hosts`: why the soak is on one machine; "" if it is on several hosts.
    """
    disk, handles = why_no_disk(), why_no_handles()
    by_target = {"disk": disk, "checkpoint-disk": disk, "files": handles, "node": no_hosts, "link": no_hosts}
    reasons = {name: by_target.get(kind.target, "") for name, kind in KINDS.items()}
    if not no_hosts:
        reasons |= {name: reasons[name] or TOGETHER for name, kind in KINDS.items() if not kind.happens_on_hosts}
    if replicas == 1:
        reasons |= {name: reasons[name] or LAST_ONE for name in NEED_ANOTHER_ENGINE}
    return {name: reason for name, reason in reasons.items() if reason}
