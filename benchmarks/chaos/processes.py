"""Finds the processes of a live run by role, and stops, slows down or kills them by signals."""

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

POLL_S = 0.2
_Told = TypeVar("_Told")
WORKER_STARTED_S = 15.0  # after which an agent worker has loops; one that is stopped in its start has none to lose
STARTED_S = 6.0  # after which a reward worker scores; late rewards replace workers every few seconds
DUTY = (0.15, 0.05)  # seconds of SIGSTOP and SIGCONT of a slow process, in turn
CRAWL = (0.475, 0.025)  # of one that is 20 times slower
AGENTS = ("torch.distributed.run", "megarl.cluster.torchrun.run")  # torchrun's modules, of a bare one and of ours
_LOG = re.compile(r"replica-(\d+)\.log")
# How the command line of each part that is one process below the supervisor begins, or what it contains.
TITLES = {
    "reward": "megarl.rewards.worker",
    "controller": "ray::RolloutController",
    "queue": "ray::SimpleStorageUnit",
    "agent-worker": "ray::AgentWorker",
}


@dataclass(frozen=True)
class Replica:
    """The processes of one replica: its Ray actor and the engine that the actor has started."""

    actor: psutil.Process
    engine: psutil.Process


def find_replicas(run_dir: Path) -> dict[int, Replica]:
    """Return the replicas of a live run that have an engine, by the index of the log that they write to.

    An actor is known by its engine, because Ray changes its title with each call.
    """
    found: dict[int, Replica] = {}
    for process in below_supervisor(run_dir):
        try:
            if _is_engine(process):
                actor = psutil.Process(process.ppid())
                if (index := _index_of(actor.pid)) is not None:
                    found[index] = Replica(actor, process)
        except (psutil.Error, OSError):
            continue  # it has ended
    return found


def _is_engine(process: psutil.Process) -> bool:
    """Return whether a process is an engine: by the title that vLLM gives it, or else as what an actor has spawned.

    The title needs room in the environment of the process, which an engine does not always have.
    """
    command = process.cmdline()
    if "EngineCore" in "".join(command[:1]):
        return True
    spawned = any("spawn_main" in part for part in command)
    return spawned and "ray::EngineReplica" in "".join(psutil.Process(process.ppid()).cmdline()[:1])


def find_processes(run_dir: Path, target: str) -> list[psutil.Process]:
    """Return the processes of a part of a live run that is not a replica, ordered by pid.

    `target`: of TITLES; "rank": the trainer's ranks; "agent": torchrun; "job": all processes of the run.
    """
    agent = find_agent(run_dir)
    if target == "agent":
        return [agent] if agent is not None else []
    if target == "rank":
        return [] if agent is None else with_title(_children(agent), "train_rl.py")
    if target == "job":
        ranks = [] if agent is None else [agent, *_children(agent, recursive=True)]
        found = {*ranks, *below_supervisor(run_dir, itself=True), *printing_to(run_dir)} - {psutil.Process()}
        return sorted(found, key=lambda process: process.pid) if agent is not None else []
    below = below_supervisor(run_dir)
    if target == "reward":  # one that is being started is noticed only after timeouts.engine_start_s
        return [each for each in _scorers(below) if age(each) > STARTED_S]
    parts = with_title(below, TITLES[target])
    if target == "agent-worker":  # as with rewards: the others work on while one is being started
        return [each for each in parts if age(each) > WORKER_STARTED_S]
    return parts


def _scorers(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that score the run's samples. With agent workers, the controller's own have no work."""
    found = with_title(processes, TITLES["reward"])
    workers = {each.pid for each in with_title(processes, TITLES["agent-worker"])}
    return [each for each in found if not workers or _ask(each.ppid, 0) in workers]


def _children(process: psutil.Process, *, recursive: bool = False) -> list[psutil.Process]:
    none: list[psutil.Process] = []
    return _ask(lambda: process.children(recursive=recursive), none)


def _ask(call: Callable[[], _Told], otherwise: _Told) -> _Told:
    """Return what is read from a process; `otherwise` if it has ended."""
    try:
        return call()
    except psutil.Error:
        return otherwise


def age(process: psutil.Process) -> float:
    """Return the seconds since the start of a process; 0 if it has ended."""
    return _ask(lambda: time.time() - float(process.create_time()), 0.0)


def find_agent(run_dir: Path) -> psutil.Process | None:
    """Return torchrun's process, None if it does not run."""
    with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
        process = psutil.Process(int(_state(run_dir)["agent"]["pid"]))
        return process if any(each in process.cmdline() for each in AGENTS) else None
    return None


def restarts_among(ranks: Sequence[psutil.Process]) -> int:
    """Return how often torchrun has restarted these ranks since its start; 0 if none runs."""
    for rank in ranks:
        with contextlib.suppress(psutil.Error, KeyError):
            return int(rank.environ()["TORCHELASTIC_RESTART_COUNT"])
    return 0


def below_supervisor(run_dir: Path, *, itself: bool = False) -> list[psutil.Process]:
    """Return all processes that the supervisor of a run has started; with `itself` the supervisor too."""
    try:
        supervisor = psutil.Process(int(_state(run_dir)["process"]["pid"]))
        return [*([supervisor] if itself else []), *supervisor.children(recursive=True)]
    except (OSError, ValueError, KeyError, psutil.Error):
        return []


def _state(run_dir: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((run_dir / "supervisor.json").read_text(encoding="utf-8"))
    return state


def with_title(processes: Sequence[psutil.Process], text: str) -> list[psutil.Process]:
    """Return the processes that have a text in their command lines, in the order of their pids."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            if text in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def _index_of(pid: int) -> int | None:
    """Return the number of the replica's log to which a process prints."""
    match = _LOG.fullmatch(Path(os.readlink(f"/proc/{pid}/fd/1")).name)
    return int(match[1]) if match else None


def processes_left(run_dir: Path, within_s: float) -> list[str]:
    """Return the processes that still print to a log of a run that has ended, `within_s` seconds later at the latest.

    Every process of a run prints to a file in its directory, or to the log alongside it.
    """
    deadline = time.monotonic() + within_s
    while (left := printing_to(run_dir)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return [f"{process.info['name']} (pid {process.pid})" for process in left]


def printing_to(run_dir: Path) -> list[psutil.Process]:
    """Return the processes whose standard output is a file of the run, or the log alongside its directory."""
    places, found = (f"{run_dir}/", f"{run_dir}.log"), []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(places):
                found.append(process)
    return found


def ended(processes: Sequence[psutil.Process]) -> bool:
    """Return whether all processes have ended."""
    return not any(is_running(process) for process in processes)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process runs, or is stopped; one that has ended and is not yet waited for does not."""
    return _ask(lambda: bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE), False)


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to each process that still runs; psutil never signals another one that has got its pid."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def is_stopped(processes: Sequence[psutil.Process]) -> bool:
    """Return whether all processes are stopped by a signal."""
    return all(_ask(process.status, "") == psutil.STATUS_STOPPED for process in processes)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the processor time that a process has used; 0 if it has ended."""
    return _ask(lambda: float(sum(process.cpu_times()[:2])), 0.0)


def hold(processes: Sequence[psutil.Process], seconds: float, until: Callable[[], bool]) -> float:
    """Stop processes for `seconds`, or until `until()`; return how long they were stopped, 0.0 if they were not."""
    send(processes, signal.SIGSTOP)
    begun = time.monotonic()
    try:
        time.sleep(min(POLL_S, seconds))
        if not is_stopped(processes):
            return 0.0
        while time.monotonic() - begun < seconds and not until():
            time.sleep(min(POLL_S, seconds))
    finally:
        send(processes, signal.SIGCONT)
    return time.monotonic() - begun


def throttle(
    processes: Sequence[psutil.Process],
    seconds: float,
    until: Callable[[], bool],
    duty: tuple[float, float] = DUTY,
) -> float:
    """Stop and continue processes in turn for `seconds`, or until `until()`; return the seconds they were stopped.

    `duty`: seconds for which they are stopped and let go, in turn.
    """
    begun, stopped = time.monotonic(), 0.0
    while time.monotonic() - begun < seconds and not until():
        stopped += hold(processes, duty[0], lambda: False)
        time.sleep(duty[1])
    return stopped
