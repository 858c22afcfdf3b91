"""The start record, stop requests and exit record of a run: RUN_DIR/start.json, RUN_DIR/stop, RUN_DIR/exit.json.

A batch script that receives the signal of its time limit writes RUN_DIR/stop. `#SBATCH --signal=B:USR1@N` signals
only the script, because a signal to torchrun's agent would kill the ranks. At the next step boundary all ranks agree to
stop, save, write exit.json and exit with status 0. The script reads the outcome from that file, because torchrun's
restarts hide the exit codes of the ranks.
"""

import errno
import logging
import os
import platform
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from megarl.common.clocks import RateLimit
from megarl.common.files import write_json

logger = logging.getLogger(__name__)

START_FILE = "start.json"
STOP_FILE = "stop"
EXIT_FILE = "exit.json"
# Space that a run gives up when the disk is full, so that it can still say how it ended.
RESERVE_FILE = ".reserve"
RESERVE_BYTES = 256 << 10
COMPLAIN_S = 60.0  # between two log lines about a file that cannot be read
GIT_S = 10.0  # for the name of the commit
_complaints = RateLimit(COMPLAIN_S)

T = TypeVar("T")
Status = Literal["finished", "preempted", "failed"]


@dataclass(frozen=True)
class StartRecord:
    """Content of RUN_DIR/start.json, of the newest start of the ranks.

    `commit`: of the git work tree in which the run was started, `-dirty` after it if files differ; "" outside of one.
    `device`: the name of rank 0's GPU, or `cpu`. `host`: that of rank 0.
    """

    version: str
    commit: str
    host: str
    device: str


def write_start(run_dir: Path, device: str) -> None:
    """Record a start on this host. A disk that refuses it keeps no run from starting: the record is only shown."""
    with suppress(OSError):
        record = StartRecord(version("megarl"), _commit(), platform.node(), device)
        write_json(run_dir / START_FILE, asdict(record))


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def read_start(run_dir: Path) -> StartRecord | None:
    """Return the start record; None if there is none that can be read, as for older runs."""
    try:
        return msgspec.json.decode((run_dir / START_FILE).read_bytes(), type=StartRecord)
    except (OSError, msgspec.DecodeError):
        return None


@dataclass(frozen=True)
class ExitRecord:
    """Content of RUN_DIR/exit.json; `step` counts the finished training steps, or the saved ones if preempted.

    `unsaved_steps`: those that a preempted run has trained after `step`, and has lost because its last save failed.
    """

    status: Status
    step: int
    reason: str
    unsaved_steps: int = 0


def write_exit(run_dir: Path, record: ExitRecord) -> None:
    """Replace RUN_DIR/exit.json atomically. On a full disk it takes the run's reserve."""
    with_reserve(run_dir, lambda: write_json(run_dir / EXIT_FILE, asdict(record)))


def make_reserve(run_dir: Path) -> None:
    """Reserve the space for the last words of a run. Raises OSError if there is none."""
    (run_dir / RESERVE_FILE).write_bytes(os.urandom(RESERVE_BYTES))  # which no file system compresses


def with_reserve(run_dir: Path, write: Callable[[], T]) -> T:
    """Return `write()`. If the disk is full, free the run's reserve and try again. Raises OSError if that fails."""
    try:
        return write()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (run_dir / RESERVE_FILE).exists():
            raise
        (run_dir / RESERVE_FILE).unlink(missing_ok=True)
        return write()


class ExitRecordError(ValueError):
    """RUN_DIR/exit.json is there, but holds no exit record."""


def read_exit(run_dir: Path) -> ExitRecord | None:
    """Return the exit record; None if there is none because the run still runs or was killed.

    Raises ExitRecordError, which names the file.
    """
    path = run_dir / EXIT_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ExitRecordError(
            f"{path} is damaged ({error}), so how the run ended is unknown; see RUN_DIR/logs"
        ) from None


def ask_to_stop(run_dir: Path, reason: str) -> None:
    """Request that the run saves and ends at its next step boundary; an earlier request keeps its reason."""
    path = run_dir / STOP_FILE
    if not path.exists():
        path.write_text(reason + "\n")


def stop_reason(run_dir: Path) -> str | None:
    """Return the reason of the stop request; None if there is no request, or if the file system fails just now.

    The caller asks again soon; a failure that ended one rank here would leave the others in a collective.
    """
    path = run_dir / STOP_FILE
    try:
        return path.read_text().strip() or "asked to stop"
    except FileNotFoundError:
        return None
    except OSError as error:
        if _complaints.allows():
            logger.warning("%s cannot be read, which counts as no request for now: %s", path, error)
        return None


def forget(run_dir: Path) -> None:
    """Remove the stop request and the exit record of an earlier launch; called before a run starts."""
    for name in (STOP_FILE, EXIT_FILE):
        (run_dir / name).unlink(missing_ok=True)
