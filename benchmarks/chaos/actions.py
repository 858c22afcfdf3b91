"""How each fault happens: by signals to processes, by files, by orders to functions of the soak."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.orders import give, taken, withdraw
from benchmarks.chaos.processes import CRAWL, DUTY, Replica, cpu_seconds, ended, hold, send, throttle
from benchmarks.chaos.watch import WatchedRun
from benchmarks.lib.file_faults import complete, damage, spoil

ENDS_S = 30.0  # for all processes of a run after a second stop signal
AGAIN_S = 1.5  # after which a second stop signal is a second request


@dataclass(frozen=True)
class Target:
    """What a fault hits: processes, if it comes from outside, and what is said of them.

    `replica`: the one that they are of, if they are of one. `wanted`: how many processes of the part there must be when
    the fault is over.
    """

    processes: Sequence[psutil.Process] = ()
    note: str = "the run was working"
    replica: Replica | None = None
    wanted: int = 0


def find_target(watch: WatchedRun, fault: Fault) -> Target | None:
    """Return what a fault hits; None if it is not there."""
    kind = fault.kind
    if kind.target in ("engine", "replica"):
        replicas = watch.find_replicas()
        if fault.index >= len(replicas):
            return None
        replica = replicas[sorted(replicas)[fault.index]]  # of those that live: new ones may have new numbers
        hit = [replica.engine] if kind.target == "engine" else [replica.actor, replica.engine]
        return Target(hit, replica=replica)
    if not kind.has_processes:
        return Target()
    if not (found := watch.find_processes(kind.target)):
        return None
    hit = found if kind.target == "job" else [found[fault.index % len(found)]]
    note = f"one of {len(found)}" if len(hit) < len(found) else "all of it"
    # Others than agent workers come and go, or are all found.
    return Target(hit, note, wanted=len(found) if kind.target == "agent-worker" else 1)


# --- processes


def _kill(watch: WatchedRun, event: Happened, target: Target) -> bool:
    there = not ended(target.processes[:1])
    send(target.processes if event.fault.kind.target == "job" else target.processes[:1], signal.SIGKILL)
    return there


def _damage(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Kill every process, and change a byte of the newest checkpoint."""
    if not _kill(watch, event, target):
        return False
    event.damaged = complete(watch.checkpoints)[-1]
    name = damage(event.damaged, random.Random(f"soak-damage-{event.fault.index}-{event.fault.delay_s}"))
    event.notes.append(f"{name} of {event.damaged.name} damaged")
    return True


def _stop(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Stop processes for the time of the fault, all of it or in turns, or until the run has ended them."""
    hit, action, seconds = target.processes, event.fault.kind.action, event.fault.seconds
    whole = hit if target.replica is None else [target.replica.actor]
    works = hit[0] if target.replica is None else target.replica.engine  # it uses the core
    used, begun = cpu_seconds(works), time.monotonic()

    def over() -> bool:
        return watch.end.is_set() or ended(whole)

    if action in ("slow", "crawl"):
        stopped = throttle(hit, seconds, over, DUTY if action == "slow" else CRAWL)
    else:
        stopped = hold(hit, seconds, over)
    lasted, used = time.monotonic() - begun, cpu_seconds(works) - used
    event.notes.append(f"stopped for {stopped:.1f} of {lasted:.1f} s, {max(used, 0.0):.1f} s of its core used")
    return stopped > 0.0


def _end_twice(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Signal torchrun's process group twice, as Ctrl-C does; False if a process is left after `ENDS_S`."""
    number = signal.SIGINT if event.fault.kind.action == "interrupt" else signal.SIGTERM
    if (agent := watch.find_agent()) is None:
        return False
    for _ in range(2):
        try:
            os.killpg(agent.pid, number)
        except ProcessLookupError:  # it has saved and ended at the first one
            break
        watch.end.wait(AGAIN_S)
    begun = time.monotonic()
    if not watch.wait(lambda: ended(target.processes), ENDS_S):
        event.notes.append(f"processes are left {ENDS_S:.0f} s after the second signal")
        return False
    event.notes.append(f"all had ended {time.monotonic() - begun:.1f} s after the second signal")
    return True


def _limit(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Ask the run to stop as a batch script does when the time limit is near."""
    (watch.run_dir / "stop").write_text("the time limit is near\n", encoding="utf-8")
    return True


# --- files and orders


def _stale(watch: WatchedRun, event: Happened, target: Target) -> bool:
    answers = spoil(watch.orders, event.fault.seconds, watch.end.is_set)
    answered = ", ".join(f"{name} {times}" for name, times in sorted(answers.items()))
    event.notes.append(f"stale handles: {answered or 'nobody has asked'}")
    return bool(answers)


def _order(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Give an order to the run's functions and wait until one has taken it; False if none does."""
    name = event.fault.kind.order
    before = len(taken(watch.orders, name))
    give(watch.orders, name)
    if not watch.notices(lambda: len(taken(watch.orders, name)) > before):
        withdraw(watch.orders, name)
        return False
    event.pid = taken(watch.orders, name)[-1]["pid"]
    event.spoiled = int(event.fault.kind.action == "spoil")
    event.notes.append(f"the order {name} was taken by process {event.pid}")
    return True


# By the action of a kind: it lets a fault happen, and returns False if that cannot be done.
ACTIONS: dict[str, Callable[[WatchedRun, Happened, Target], bool]] = {
    "kill": _kill,
    "damage": _damage,
    "hang": _stop,
    "pause": _stop,
    "slow": _stop,
    "crawl": _stop,
    "interrupt": _end_twice,
    "terminate": _end_twice,
    "limit": _limit,
    "stale": _stale,
    "spoil": _order,
    "fork": _order,
    "flood": _order,
}
