"""Kills an engine, or a trainer rank, once in a turn of shared GPUs.

`-m tests.support.runs.shared_faults` is `examples/rl/train_rl.py` with SHARED_FAULT, a key of FAULTS, in the trainer's
ranks. Each fault leaves the file SHARED_FAULT_MARK, so that restarted ranks pass it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megarl.run.loop import shared_gpus
from megarl.run.loop.shared_gpus import SharedGpus
from tests.support.pool.leftovers import MARK

AFTER = 2  # the first hand-over that a fault meets


def kill_engine() -> None:
    """Kill the process in which an engine of this run computes."""
    for process in psutil.process_iter(["name"]):
        try:
            if "EngineCor" in process.info["name"] and process.environ().get(MARK) == os.environ[MARK]:
                process.kill()
                return
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    raise AssertionError("there is no engine to kill")


def once(fault: Callable[[], None]) -> None:
    """Do it unless it has been done."""
    try:
        Path(os.environ["SHARED_FAULT_MARK"]).touch(exist_ok=False)
    except FileExistsError:
        return
    fault()


def around_sleep(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call these around the sleep of all engines, from hand-over AFTER on."""
    original, calls = shared_gpus.put_to_sleep, list[int]()

    def put_to_sleep(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) >= AFTER:
            before()
        result = original(*arguments)
        if len(calls) >= AFTER:
            after()
        return result

    shared_gpus.put_to_sleep = put_to_sleep  # type: ignore[assignment]


def nothing() -> None: ...


def engine_in_hand_over() -> None:
    around_sleep(lambda: once(kill_engine), nothing)


def engine_asleep() -> None:
    around_sleep(nothing, lambda: once(kill_engine))


def engine_awake() -> None:
    original, calls = SharedGpus.generate, list[int]()

    def generate(self: SharedGpus) -> None:
        original(self)
        calls.append(1)
        if len(calls) >= AFTER and os.environ["RANK"] == "0":
            once(kill_engine)

    SharedGpus.generate = generate  # type: ignore[method-assign]


def rank_parked() -> None:
    original, calls = SharedGpus.generate, list[int]()

    def generate(self: SharedGpus) -> None:
        original(self)
        calls.append(1)
        if len(calls) >= AFTER and os.environ["RANK"] == "1":
            once(lambda: os.kill(os.getpid(), signal.SIGKILL))

    SharedGpus.generate = generate  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "engine in hand-over": engine_in_hand_over,
    "engine asleep": engine_asleep,
    "engine awake": engine_awake,
    "rank parked": rank_parked,
}

if __name__ == "__main__":
    from megarl.run.start.main import main

    FAULTS[os.environ["SHARED_FAULT"]]()
    main()
