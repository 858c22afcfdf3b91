"""The claim on a run directory: RUN_DIR/claim.json names the one run that may write there.

A start claims the directory before it moves or writes anything there. While the holder runs, the start is refused and
changes nothing. A holder on the same host is judged by its process, others by their heartbeat, the file's modification
time. If the process is gone, or the heartbeat is older than `timeouts.node_s`, the next start takes over.

The file is created with O_EXCL and taken over under a lock on it, so only one start wins. A holder that finds another
run's claim (`RunClaim.renew`) was suspended, or lost it to `--force`, and ends. Times are the file system's, because
the clocks of two hosts may differ.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec

from megarl.common.errors import ConfigError
from megarl.common.files import replace_file
from megarl.common.process.processes import ProcessId, has_ended, this_place

logger = logging.getLogger(__name__)

CLAIM_FILE = "claim.json"
RENEW_S = 2.0
# Environment variable of the ranks: set if a node's agent has started them, to the id of its launch.
LAUNCH_ID_VARIABLE = "MEGARL_LAUNCH_ID"


@dataclass(frozen=True)
class Holder:
    """The run that holds a directory. `what`: its command, for messages; `launch`: the id of a launch, if it has one.

    `place`: where `process` is meaningful: host, boot and pid namespace.
    """

    what: str
    host: str
    place: str
    process: ProcessId
    launch: str | None = None
    since: str = ""

    @classmethod
    def here(cls, what: str, process: ProcessId, launch: str | None = None) -> Holder:
        """Return the holder that is `process`, which runs on this host."""
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(what, platform.node(), this_place(), process, launch, since)

    def same_run(self, other: Holder) -> bool:
        """Say whether both are one run: one launch, or one process (torchrun's agent) that has restarted its ranks."""
        if self.launch is not None or other.launch is not None:
            return self.launch == other.launch
        return self.place == other.place and self.process == other.process

    def describe(self) -> str:
        """Return the holder in words, for an error message."""
        if self == UNKNOWN:
            return self.what
        launch = f", launch {self.launch}" if self.launch is not None else ""
        return f"{self.what} (pid {self.process.pid} on {self.host}{launch}, since {self.since})"


UNKNOWN = Holder("an unknown run", "", "", ProcessId(0, 0))  # of a claim that cannot be read


@dataclass(frozen=True)
class Sighting:
    """A claim's file as a start has seen it."""

    holder: Holder
    renewed_ns: int

    @classmethod
    def of(cls, run_dir: Path, name: str = CLAIM_FILE) -> Sighting | None:
        """Read the claim on `run_dir`; None if there is none."""
        try:
            with (run_dir / name).open("rb") as file:
                renewed_ns, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return None
        try:
            return cls(msgspec.json.decode(content, type=Holder), renewed_ns)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return cls(UNKNOWN, renewed_ns)

    def has_ended(self) -> bool | None:
        """Return whether the holder, a process of this host, has ended; None if it is of another place or unknown."""
        return None if self.holder == UNKNOWN else has_ended(self.holder.process, self.holder.place)


class RunClaim:
    """This run's claim on `run_dir`, until `release`."""

    def __init__(self, run_dir: Path, holder: Holder) -> None:
        self.run_dir, self.holder = run_dir, holder
        self._released = threading.Event()
        self._failing = False

    def renew(self) -> Holder | None:
        """Show that the holder is alive. Return the run that has taken the directory meanwhile, if one has.

        A failure of the file system is logged once and tolerated: the next call tries again.
        """
        try:
            seen = Sighting.of(self.run_dir)
            if seen is not None and seen.holder != UNKNOWN and not seen.holder.same_run(self.holder):
                return seen.holder
            if seen is None:  # it was deleted, and a start may be about to make its own
                _create(self.run_dir, self.holder)
            else:
                os.utime(self.run_dir / CLAIM_FILE)  # needs no space on a full disk
            self._failing = False
        except OSError as error:
            if not self._failing:
                logger.warning("the claim on %s could not be renewed: %s", self.run_dir, error)
            self._failing = True
        return None

    def renew_in_background(self, on_lost: Callable[[Holder], None]) -> None:
        """Renew in a daemon thread until `release`. `on_lost`: called if another run has taken the directory."""

        def work() -> None:
            while not self._released.wait(RENEW_S):
                other = self.renew()
                if other is not None:
                    on_lost(other)
                    return

        threading.Thread(target=work, name="renew-claim", daemon=True).start()

    def release(self) -> None:
        """Give the directory up, if it is still this run's."""
        self._released.set()
        try:
            seen = Sighting.of(self.run_dir)
            if seen is not None and seen.holder.same_run(self.holder):
                (self.run_dir / CLAIM_FILE).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("the claim on %s could not be removed: %s", self.run_dir, error)


def claim(
    run_dir: Path, mine: Holder, node_s: float, say: Callable[[str], object] = lambda text: None, *, force: bool = False
) -> RunClaim:
    """Claim `run_dir`, creating it if needed. A restart of the same run keeps its claim.

    While a holder on another host may still run, the call reports one line to `say` and waits at most `node_s`.
    `force`: take the directory whoever holds it.

    Raises ConfigError, and has changed nothing, if another run holds the directory or it cannot be written.
    """
    run_dir, taken = Path(run_dir), None
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        while not _create(run_dir, mine):
            if (seen := Sighting.of(run_dir)) is None:
                continue
            if seen.holder.same_run(mine):
                if seen.holder.process != mine.process:  # a launch's agent takes over
                    replace_file(run_dir / CLAIM_FILE, msgspec.json.encode(replace(mine, since=seen.holder.since)))
                return RunClaim(run_dir, mine)
            if not force:
                _await_silence(run_dir, seen, node_s, say)
            if _take_over(run_dir, mine, seen, node_s):
                taken = seen
                break
        if force and taken is not None and not taken.has_ended():
            _await_end(run_dir, taken, node_s, say)
    except OSError as error:
        raise ConfigError([f"run.dir: {run_dir} cannot be claimed: {error}"]) from None
    return RunClaim(run_dir, mine)


def _await_silence(run_dir: Path, seen: Sighting, node_s: float, say: Callable[[str], object]) -> None:
    """Return when the holder has ended, or has been silent for `node_s`. Raises ConfigError if it is alive."""
    if (ended := seen.has_ended()) is None:
        with tempfile.NamedTemporaryFile(prefix=f".{CLAIM_FILE}.", dir=run_dir) as file:
            silent_s = (os.fstat(file.fileno()).st_mtime_ns - seen.renewed_ns) / 1e9
        if silent_s < node_s:
            say(
                f"{run_dir} was claimed by {seen.holder.describe()}; waiting up to {node_s:.0f} s (timeouts.node_s) to "
                "see whether that run is still alive"
            )
        until, now = time.monotonic() + node_s - max(0.0, silent_s), Sighting.of(run_dir)
        while now == seen and time.monotonic() < until:
            time.sleep(min(RENEW_S / 2, node_s / 4))
            now = Sighting.of(run_dir)
        ended = now in (None, seen)
    if not ended:
        raise ConfigError([in_use(run_dir, seen)])


def _await_end(run_dir: Path, taken: Sighting, node_s: float, say: Callable[[str], object]) -> None:
    """Wait until the run that lost its claim to `--force` has noticed, and on this host until its process is gone."""
    say(
        f"{run_dir} is taken from {taken.holder.describe()}; waiting up to {node_s:.0f} s (timeouts.node_s) for its end"
    )
    began = time.monotonic()
    while (waited := time.monotonic() - began) < 2 * RENEW_S or (taken.has_ended() is False and waited < node_s):
        time.sleep(RENEW_S / 10)


def _create(run_dir: Path, mine: Holder) -> bool:
    """Make the claim; return False if there is one."""
    path = run_dir / CLAIM_FILE
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(msgspec.json.encode(mine))
    except OSError:
        path.unlink(missing_ok=True)  # an empty claim would be one of an unknown run
        raise
    return True


def _take_over(run_dir: Path, mine: Holder, judged: Sighting, node_s: float) -> bool:
    """Replace the claim that was judged by `mine`. Return False if it is another one by now, or gone.

    Starts that judge the same claim take turns by a lock on its file, and the first one replaces the file, so readers
    always see a claim. Where files cannot be locked, the loser of the race finds out by `RunClaim.renew`. Raises
    ConfigError if another start holds the lock for `node_s`.
    """
    path, deadline = run_dir / CLAIM_FILE, time.monotonic() + node_s
    try:
        file = path.open("r+b")  # NFS gives an exclusive lock only to who may write
    except FileNotFoundError:
        return False
    with file:
        while not _locked(file):
            if time.monotonic() > deadline:
                raise ConfigError(
                    [
                        f"run.dir: waited {node_s:.0f} s (timeouts.node_s) for another start that takes "
                        f"{run_dir} over; end that start, or remove {path}"
                    ]
                )
            time.sleep(RENEW_S / 40)
        if Sighting.of(run_dir) != judged:
            return False
        replace_file(path, msgspec.json.encode(mine))
        return True


def _locked(file: IO[bytes]) -> bool:
    """Lock `file` until it is closed; return False if another process or thread has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def other_holder(run_dir: Path, mine: Holder) -> Holder | None:
    """Return the run that holds `run_dir`, unless it is the run of `mine`.

    None also if there is no readable claim: only a known holder keeps a run from recording how it ended.
    """
    try:
        seen = Sighting.of(run_dir)
    except OSError as error:
        logger.warning("the claim on %s cannot be read: %s", run_dir, error)
        return None
    return None if seen is None or seen.holder == UNKNOWN or seen.holder.same_run(mine) else seen.holder


def in_use(run_dir: Path, seen: Sighting) -> str:
    """Return the message for a start that is refused: who holds the directory, and what to do."""
    return (
        f"run.dir: {run_dir} is in use by {seen.holder.describe()}; nothing was changed. Wait for that run, make it "
        f"save and end (touch {run_dir / 'stop'}), or choose another run.dir; --force of megarl train and launch ends "
        "that run"
    )


def refuse_claimed(run_dir: Path) -> None:
    """Raise ConfigError if a live process of this host holds `run_dir`. Changes nothing and does not wait."""
    seen = Sighting.of(run_dir)
    if seen is not None and seen.has_ended() is False:
        raise ConfigError([in_use(run_dir, seen)])


def await_claim(run_dir: Path, mine: Holder, timeout_s: float) -> None:
    """Wait until the run of `mine` holds `run_dir`. Raises TimeoutError, saying who holds it, after `timeout_s`.

    A file system that fails for a moment is asked again. Raises OSError if it still fails then.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        late = time.monotonic() > deadline
        try:
            seen = Sighting.of(run_dir)
        except OSError:
            if late:
                raise
            seen = None
        if seen is not None and seen.holder.same_run(mine):
            return
        if late:
            who = "nobody" if seen is None else seen.holder.describe()
            raise TimeoutError(f"this rank waited {timeout_s:.0f} s for its run to claim {run_dir}, which {who} holds")
        time.sleep(0.1)
