"""How a run is asked to stop early, and how it says why it ended: RUN_DIR/stop, SIGTERM, RUN_DIR/exit.json.

A batch script that learns of its time limit writes RUN_DIR/stop (`#SBATCH --signal=B:USR1@N` reaches it alone; a signal
to torchrun's agent would kill the ranks). Ranks agree on it at the step boundary, save, write exit.json and exit 0. The
script judges by that file, because a rank's exit code does not survive torchrun's restarts.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from megarl.common.files import write_json

STOP_FILE = "stop"
EXIT_FILE = "exit.json"

Status = Literal["finished", "preempted", "failed"]


@dataclass(frozen=True)
class ExitRecord:
    """Content of RUN_DIR/exit.json; `step`: training steps done, or, if preempted, those that are saved."""

    status: Status
    step: int
    reason: str


def write_exit(run_dir: Path, record: ExitRecord) -> None:
    """Replace RUN_DIR/exit.json atomically."""
    write_json(run_dir / EXIT_FILE, asdict(record))


def read_exit(run_dir: Path) -> ExitRecord | None:
    """None if the run has not said how it ended: it is running, or was killed."""
    try:
        return ExitRecord(**json.loads((run_dir / EXIT_FILE).read_text()))
    except FileNotFoundError:
        return None


def ask_to_stop(run_dir: Path, reason: str) -> None:
    """Make the run save and end at its next step boundary. The first reason stays."""
    path = run_dir / STOP_FILE
    if not path.exists():
        path.write_text(reason + "\n")


def stop_reason(run_dir: Path) -> str | None:
    """Why the run was asked to stop; None if it was not."""
    try:
        return (run_dir / STOP_FILE).read_text().strip() or "asked to stop"
    except FileNotFoundError:
        return None


def forget(run_dir: Path) -> None:
    """Remove what an earlier launch in the same directory left; by whoever starts a run, before it starts."""
    for name in (STOP_FILE, EXIT_FILE):
        (run_dir / name).unlink(missing_ok=True)


class TerminationFlag:
    """SIGTERM as a wish, not an end. Install it in the main thread after `ray.init`, which sets its own handler."""

    def __init__(self) -> None:
        self.raised = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
