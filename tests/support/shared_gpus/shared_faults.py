"""Kills a part of a run in every turn of shared GPUs, once in each.

`-m tests.support.shared_gpus.shared_faults` is `examples/rl/train_rl.py` with SHARED_FAULT, a key of VICTIMS, in the
trainer's ranks. The directory SHARED_FAULT_MARKS has a file for each turn in which the victim has been killed, so that
restarted ranks go on with the next one; it holds the number of steps before. Between two faults a whole step is made.

It also writes down when each rank holds memory, in `holds-RANK.jsonl` there.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil

from megarl.run.loop import loop
from megarl.run.loop.gpu_turns import GpuTurns, Turn
from megarl.run.loop.shared_gpus import SharedGpus
from megarl.trainer.parking import EVERYTHING, Part, StateMemory
from megarl.trainer.policy import Policy
from megarl.weights.group.relay import TrainerEnd
from tests.support.pool.leftovers import MARK
from tests.support.runs.run import step_records

# In this order. Where responses are in flight the rest of the run differs from an undisturbed one: that turn is last.
TURNS = (Turn.HANDING_OVER, Turn.TRAIN, Turn.PUBLISH, Turn.HANDING_BACK, Turn.GENERATE)
BROADCASTS = 2  # that a publication begins before its fault
IN_FLIGHT_S = 0.1  # after which responses are in flight
RANK = os.environ.get("RANK", "0")


def kill_engine() -> None:
    """Kill the process in which an engine of this run computes."""
    kill_of_run(lambda process: "EngineCor" in process.name())


def kill_replica() -> None:
    """Kill the actor of an engine of this run; the engine ends with it."""
    kill_of_run(lambda process: "ray::EngineReplica" in " ".join(process.cmdline()))


def kill_of_run(wanted: Callable[[psutil.Process], bool]) -> None:
    """Kill one process of this run."""
    supervisor = json.loads((Path(os.environ[MARK]) / "supervisor.json").read_text())["process"]["pid"]
    for process in psutil.Process(supervisor).children(recursive=True):
        try:
            if wanted(process):
                process.kill()
                process.wait(60)
                return
        except psutil.NoSuchProcess:
            continue
    raise AssertionError("there is no such process to kill")


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_both() -> None:
    kill_engine()
    kill_this_rank()


# The rank that does it, and what it does.
VICTIMS: dict[str, tuple[str, Callable[[], None]]] = {
    "engine": ("0", kill_engine),
    "replica": ("0", kill_replica),
    "rank 0": ("0", kill_this_rank),
    "rank 1": ("1", kill_this_rank),
    "rank and engine": ("1", kill_both),
}


class Faults:
    """The faults of this process; `ready`: a whole step has been made since the last one."""

    def __init__(self, rank: str, kill: Callable[[], None], marks: Path) -> None:
        self.mine, self.kill, self.marks = rank == RANK, kill, marks
        self.trained = self.ready = False
        self.broadcasts = 0

    def reach(self, turn: Turn) -> None:
        """This rank is in `turn`: the fault may be due."""
        left = [each for each in TURNS if not (self.marks / each).exists()]
        if self.mine and self.ready and left[:1] == [turn]:
            (self.marks / turn).write_text(str(len(step_records(Path(os.environ[MARK])))))
            self.trained = self.ready = False
            if turn is Turn.GENERATE:
                threading.Timer(IN_FLIGHT_S, self.kill).start()
            else:
                self.kill()


def after(owner: type, method: str, then: Callable[..., object]) -> None:
    """Call `then` with the arguments of a method when that has returned."""
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    setattr(owner, method, call)


def inject(faults: Faults) -> None:
    """Have this process reach every turn."""
    after(GpuTurns, "hand_over", lambda *_: faults.reach(Turn.HANDING_OVER))
    after(GpuTurns, "hand_back", lambda *_: faults.reach(Turn.HANDING_BACK))
    train_step = loop.train_step

    def train(*args: Any, **kwargs: Any) -> Any:
        faults.reach(Turn.TRAIN)
        trained = train_step(*args, **kwargs)
        faults.trained = True
        return trained

    loop.train_step = train  # type: ignore[assignment]

    def begun(*_: object) -> None:
        faults.broadcasts += 1
        if faults.broadcasts > BROADCASTS:
            faults.reach(Turn.PUBLISH)

    after(TrainerEnd, "broadcast", begun)

    def generates(*_: object) -> None:
        faults.broadcasts = 0
        faults.reach(Turn.GENERATE)
        faults.ready = faults.trained

    after(SharedGpus, "generate", generates)


def write_down(file: Path) -> None:
    """Append when this rank holds what from now on: seconds since the epoch and parts."""

    def line(parts: Collection[Part]) -> None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"at": time.time(), "holds": sorted(parts)}) + "\n")

    build, hold = Policy.__init__, StateMemory.hold

    def built(policy: Policy, *args: Any) -> None:
        line(EVERYTHING)
        build(policy, *args)

    def held(memory: StateMemory, wanted: Collection[Part]) -> int:
        line(memory.resident | frozenset(wanted))
        moved = hold(memory, wanted)
        line(wanted)
        return moved

    line(())  # it has just started
    Policy.__init__, StateMemory.hold = built, held  # type: ignore[method-assign]


if __name__ == "__main__":
    from megarl.run.start.main import main

    marks = Path(os.environ["SHARED_FAULT_MARKS"])
    write_down(marks / f"holds-{RANK}.jsonl")
    inject(Faults(*VICTIMS[os.environ["SHARED_FAULT"]], marks))
    main()
