"""Kills the rollout controller, or asks the run to stop, while the trainer has the shared GPUs.

`-m tests.support.shared_gpus.stream_faults` is `examples/rl/train_rl.py` with STREAM_FAULT, a key of FAULTS, in the
trainer's ranks. It happens once, at the beginning of an update.
"""

import os
from pathlib import Path
from typing import Any

from megarl.run.loop import loop
from tests.support.pool.leftovers import MARK
from tests.support.runs.whole_runs import actors


def kill_controller(run_dir: Path) -> None:
    (controller,) = actors(run_dir, "RolloutController")
    controller.kill()


def ask_to_stop(run_dir: Path) -> None:
    (run_dir / "stop").touch()


# The step in which it happens, and what.
FAULTS = {"controller": (0, kill_controller), "stop": (1, ask_to_stop)}


def install() -> None:
    """Let the first rank meet the fault."""
    step_of_fault, fault = FAULTS[os.environ["STREAM_FAULT"]]
    original = loop.train_step

    def train_step(*arguments: Any, step: int, **others: Any) -> Any:
        if step == step_of_fault and os.environ["RANK"] == "0":
            fault(Path(os.environ[MARK]))
        return original(*arguments, step=step, **others)

    loop.train_step = train_step


if __name__ == "__main__":
    from megarl.run.start.main import main

    install()
    main()
