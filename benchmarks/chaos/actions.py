"""How each fault happens: by signals to processes, by files, by orders to functions of the soak, by `megarl pool`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from benchmarks.chaos.kinds import Fault, Happened
from benchmarks.chaos.orders import give, taken, withdraw
from benchmarks.chaos.processes import CRAWL, DUTY, Replica, cpu_seconds, ended, hold, send, throttle
from benchmarks.chaos.watch import WatchedRun
from benchmarks.lib.file_faults import complete, damage, fill, spoil
from benchmarks.lib.whole_run import environment

ENDS_S = 30.0  # for all processes of a run after a second stop signal
AGAIN_S = 1.5  # after which a second stop signal is a second request
COMMAND_S = 300.0  # for `megarl pool`, which waits for the start of an engine
SERVE_S = 300.0  # for an engine that joins with the next publication


@dataclass(frozen=True)
class Target:
    """What a fault hits: processes, if it comes from outside, and what is told of them.

    `replica`, `number`: the replica that they are of, if they are of one. `wanted`: how many processes of the part
    there must be when the fault is over.
    """

    processes: Sequence[psutil.Process] = ()
    note: str = "the run was working"
    replica: Replica | None = None
    number: int = -1
    wanted: int = 0


def find_target(watch: WatchedRun, fault: Fault) -> Target | None:
    """Return what a fault hits; None if it is not there."""
    kind = fault.kind
    if kind.target in ("engine", "replica"):
        replicas = watch.find_replicas()
        if fault.index >= len(replicas):
            return None
        number = sorted(replicas)[fault.index]  # of those that live: new ones may have new numbers
        replica = replicas[number]
        hit = [replica.engine] if kind.target == "engine" else [replica.actor, replica.engine]
        return Target(hit, replica=replica, number=number)
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


def _fill(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Fill the run's disk for the time of the fault; that of the checkpoints at most until a failed save is told."""
    checkpoints = event.fault.kind.target == "checkpoint-disk"

    def over() -> bool:
        return watch.end.is_set() or (checkpoints and watch.has_told(event))

    full_s = fill(watch.checkpoints if checkpoints else watch.run_dir, event.fault.seconds, over)
    event.notes.append(f"full for {full_s:.1f} s")
    return True


def _stale(watch: WatchedRun, event: Happened, target: Target) -> bool:
    answers = spoil(watch.orders, event.fault.seconds, watch.end.is_set)
    told = ", ".join(f"{name} {times}" for name, times in sorted(answers.items()))
    event.notes.append(f"stale handles: {told or 'nobody has asked'}")
    return bool(answers)


def _order(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Give an order to the run's functions and wait until one has taken it; False if none does."""
    name = event.fault.kind.order
    before = len(taken(watch.orders, name))
    give(watch.orders, name)
    if not watch.notices(lambda: len(taken(watch.orders, name)) > before):
        withdraw(watch.orders, name)
        return False
    event.pid = taken(watch.orders, name)[-1]
    event.spoiled = int(event.fault.kind.action == "spoil")
    event.notes.append(f"the order {name} was taken by process {event.pid}")
    return True


# --- the pool, which is in the end as large as it was


def _drain(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Take a replica out of work for two steps, and back in; False if the run refuses or does not go on."""
    return all(_ask(watch, event, "drain", target.number, *undo) and watch.goes_on() for undo in ([], ["--undo"]))


def _add(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Add a replica, let it serve for two steps, and remove it; False if one of that fails."""
    number = _added(watch, event)
    return number is not None and watch.goes_on() and _removed(watch, event, number)


def _remove(watch: WatchedRun, event: Happened, target: Target) -> bool:
    """Remove a replica, and two steps later add another one; False if one of that fails."""
    return _removed(watch, event, target.number) and _added(watch, event) is not None and watch.goes_on()


def _added(watch: WatchedRun, event: Happened) -> int | None:
    """Return the number of a replica that was added and serves; None if it does not."""
    before = set(_states(watch))
    if not _ask(watch, event, "add") or not (added := set(_states(watch)) - before):
        return None
    (number,) = added
    return number if watch.wait(lambda: _states(watch).get(number) == "serving", SERVE_S) else None


def _removed(watch: WatchedRun, event: Happened, number: int) -> bool:
    return _ask(watch, event, "remove", number) and watch.goes_on() and number not in _states(watch)


def _states(watch: WatchedRun) -> dict[int, str]:
    """Return the state of each replica by its number; {} if the run does not say it."""
    told = _pool(watch, "list", "--json")
    return {} if told.returncode else {each["replica"]: each["state"] for each in json.loads(told.stdout)["replicas"]}


def _ask(watch: WatchedRun, event: Happened, action: str, *arguments: object) -> bool:
    """Have `megarl pool` change the pool, and note what it answers; False if it fails."""
    told = _pool(watch, action, *arguments)
    event.notes.append((told.stdout or told.stderr).strip().splitlines()[-1])
    return told.returncode == 0


def _pool(watch: WatchedRun, action: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", "pool", action, str(watch.run_dir), *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=COMMAND_S, check=False)


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
    "fill": _fill,
    "stale": _stale,
    "spoil": _order,
    "fork": _order,
    "flood": _order,
    "drain": _drain,
    "add": _add,
    "remove": _remove,
}
