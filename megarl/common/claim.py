"""The claim on a run directory: RUN_DIR/claim.json names the one run that may write there.

A start claims the directory before it moves or writes anything in it. It is refused, and changes nothing, while the
holder is known to run: on the same host by its pid and start time, on another one because it renews the file's
modification time. A holder on another host that has been silent for `timeouts.node_s` has lost its claim.

The directory is locked (flock) while a start decides, which some shared file systems do for one host only, or not at
all. So the first claim is a hard link, which only one start can make, and whoever replaces the claim of another run
reads it again after `SETTLE_S`. Last, the holder's own check finds a claim that was overwritten (`RunClaim.renew`), and
ends that run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from megarl.common.errors import ConfigError
from megarl.common.processes import ProcessId, is_alive

logger = logging.getLogger(__name__)

CLAIM_FILE = "claim.json"
RENEW_S = 2.0
# How long a claim of another host is watched at least, however old the file is by this host's clock.
WATCH_S = 5 * RENEW_S
LOCK_S = 30.0
# After which a start that has replaced another run's claim looks if a third one has done the same.
SETTLE_S = 1.0
_NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}

# Of a file system without hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK}

ClaimVerdict = Literal["free", "held", "unclear"]
ClaimOutcome = Literal["sure", "lost", "contested"]


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
        """Tell whether both are one run: one launch, or one process (torchrun's agent) that has restarted its ranks."""
        if self.launch is not None or other.launch is not None:
            return self.launch == other.launch
        return self.place == other.place and self.process == other.process

    def describe(self) -> str:
        """Return the holder in words, for an error message."""
        launch = f", launch {self.launch}" if self.launch is not None else ""
        return f"{self.what} (pid {self.process.pid} on {self.host}{launch}, since {self.since})"

    def to_text(self) -> str:
        """Return the content of the claim's file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Holder:
        """Return the holder that `to_text` has written. Raises ValueError for anything else."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "process": ProcessId(**fields["process"])})
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a claim: {error}") from None


def this_place() -> str:
    """Name host, boot and pid namespace of this process: two processes of one place see each other's pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()}/{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


@dataclass(frozen=True)
class Sighting:
    """A claim's file as a start has seen it. `holder` is None if the content is not readable as a claim."""

    holder: Holder | None
    renewed_ns: int

    @classmethod
    def of(cls, run_dir: Path) -> Sighting | None:
        """Read the claim on `run_dir`; None if there is none."""
        path = run_dir / CLAIM_FILE
        try:
            with path.open(encoding="utf-8", errors="replace") as file:  # damaged content is no reason to fail
                renewed_ns, text = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except FileNotFoundError:
            return None
        try:
            return cls(Holder.from_text(text), renewed_ns)
        except ValueError:
            return cls(None, renewed_ns)


def judge(
    seen: Sighting | None, first: Sighting | None, mine: Holder, *, watched_s: float, age_s: float, node_s: float
) -> ClaimVerdict:
    """Tell whether the directory is free for `mine`: `seen` is the claim now, `first` when the start began to watch.

    `watched_s`: for how long it has watched; `age_s`: the time since the last renewal, by this host's clock, which may
    differ from the holder's. "unclear" means that it has to be watched for longer.
    """
    if seen is None:
        return "free"
    holder = seen.holder
    if holder is not None and holder.same_run(mine):
        return "free"
    if holder is not None and holder.place == mine.place:
        return "held" if is_alive(holder.process) else "free"
    if seen != first:
        return "held"
    enough_s = min(WATCH_S, node_s) if age_s >= node_s else node_s
    return "free" if watched_s >= enough_s else "unclear"


class RunClaim:
    """This run's claim on `run_dir`, until `release`."""

    def __init__(self, run_dir: Path, holder: Holder) -> None:
        self.run_dir, self.holder = run_dir, holder
        self._path = run_dir / CLAIM_FILE
        self._released = threading.Event()
        self._failing = False

    def renew(self) -> Holder | None:
        """Show that the holder is alive. Return the run that has taken the directory meanwhile, if one has.

        A failure of the file system is logged once and tolerated: the next call tries again.
        """
        try:
            seen = Sighting.of(self.run_dir)
            if seen is not None and seen.holder is not None and not seen.holder.same_run(self.holder):
                return seen.holder
            if seen is None:  # it was deleted, and a start may be about to make its own
                _take(self.run_dir, None, self.holder)
            else:
                os.utime(self._path)  # needs no space on a full disk
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
            with _locked(self.run_dir):
                seen = Sighting.of(self.run_dir)
                if seen is not None and seen.holder is not None and seen.holder.same_run(self.holder):
                    self._path.unlink(missing_ok=True)
        except (OSError, ConfigError) as error:
            logger.warning("the claim on %s could not be removed: %s", self.run_dir, error)


def claim(run_dir: Path, mine: Holder, node_s: float, say: Callable[[str], object] = lambda text: None) -> RunClaim:
    """Claim `run_dir`, which is made if it does not exist. A restart of the same run keeps its claim.

    While it is unclear whether a holder on another host still runs, `say` gets one line and the call waits, `node_s`
    at most. Raises ConfigError, and has changed nothing, if another run holds the directory or it cannot be written.
    """
    run_dir = Path(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return _claim(run_dir, mine, node_s, say)
    except OSError as error:
        raise ConfigError([f"run.dir: {run_dir} cannot be claimed: {error}"]) from None


def _claim(run_dir: Path, mine: Holder, node_s: float, say: Callable[[str], object]) -> RunClaim:
    started, first, told = time.monotonic(), Sighting.of(run_dir), False
    while True:
        with _locked(run_dir):
            seen = Sighting.of(run_dir)
            age_s = time.time() - seen.renewed_ns / 1e9 if seen is not None else 0.0
            watched_s = time.monotonic() - started
            verdict = judge(seen, first, mine, watched_s=watched_s, age_s=age_s, node_s=node_s)
            if verdict == "free":
                taken = _take(run_dir, seen, mine)
        if verdict == "free":
            if taken == "lost":  # another start was first: judge its claim
                continue
            if taken == "contested":
                _settle(run_dir, mine)
            return RunClaim(run_dir, mine)
        if verdict == "held":
            raise ConfigError([in_use(run_dir, seen)])
        if not told:
            told = True
            say(
                f"{run_dir} was claimed by {_who(seen)}; waiting up to {node_s:.0f} s (timeouts.node_s) to see whether "
                "that run is still alive"
            )
        time.sleep(min(RENEW_S / 2, node_s / 4))


def _take(run_dir: Path, seen: Sighting | None, mine: Holder) -> ClaimOutcome:
    """Write the claim of `mine`, unless it is there already. A node's agent takes over from its launch script.

    "sure": no other start can have it; "lost": another one has made its claim since `seen`; "contested": another start,
    which saw the same, may write its own too.
    """
    before = seen.holder if seen is not None else None
    if before is not None and before.same_run(mine):
        if before.process != mine.process:
            _write(run_dir, replace(mine, since=before.since))
        return "sure"
    if seen is None:
        try:
            _write(run_dir, mine, first=True)
            return "sure"
        except FileExistsError:
            return "lost"
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
    _write(run_dir, mine)
    return "contested"


def _settle(run_dir: Path, mine: Holder) -> None:
    """Raise ConfigError unless the claim is still that of `mine` after `SETTLE_S`."""
    time.sleep(SETTLE_S)
    seen = Sighting.of(run_dir)
    if seen is None or seen.holder is None or not seen.holder.same_run(mine):
        raise ConfigError([in_use(run_dir, seen)])


def other_holder(run_dir: Path, mine: Holder) -> Holder | None:
    """Return the run that holds `run_dir`, if it is another one than that of `mine`.

    None too if nobody holds it or the claim cannot be read: only a known holder keeps a run from saying how it ended.
    """
    try:
        seen = Sighting.of(run_dir)
    except OSError as error:
        logger.warning("the claim on %s cannot be read: %s", run_dir, error)
        return None
    holder = seen.holder if seen is not None else None
    return None if holder is None or holder.same_run(mine) else holder


def _who(seen: Sighting | None) -> str:
    return "an unknown run" if seen is None or seen.holder is None else seen.holder.describe()


def in_use(run_dir: Path, seen: Sighting | None) -> str:
    """Return the message for a start that is refused: who holds the directory, and what to do."""
    return (
        f"run.dir: {run_dir} is in use by {_who(seen)}; nothing was changed. Wait for that run, make it save and end "
        f"(touch {run_dir / 'stop'}), or choose another run.dir"
    )


def refuse_claimed(run_dir: Path) -> None:
    """Raise ConfigError if a process of this host that runs holds `run_dir`. Changes nothing and does not wait."""
    seen = Sighting.of(run_dir)
    holder = seen.holder if seen is not None else None
    if holder is not None and holder.place == this_place() and is_alive(holder.process):
        raise ConfigError([in_use(run_dir, seen)])


def await_claim(run_dir: Path, mine: Holder, timeout_s: float) -> None:
    """Wait until the run of `mine` holds `run_dir`. Raises TimeoutError, saying who holds it, after `timeout_s`.

    A file system that fails for a moment is asked again. Raises OSError if it still fails then.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            seen = Sighting.of(run_dir)
        except OSError:
            if time.monotonic() > deadline:
                raise
            seen = None
        if seen is not None and seen.holder is not None and seen.holder.same_run(mine):
            return
        if time.monotonic() > deadline:
            who = "nobody" if seen is None else _who(seen)
            raise TimeoutError(f"this rank waited {timeout_s:.0f} s for its run to claim {run_dir}, which {who} holds")
        time.sleep(0.1)


def _write(run_dir: Path, holder: Holder, *, first: bool = False) -> None:
    """Write the claim whole or not at all. Raises FileExistsError if it is to be the `first` one, and is not."""
    temporary = run_dir / f".{CLAIM_FILE}.{platform.node()}.{os.getpid()}"
    try:
        temporary.write_text(holder.to_text(), encoding="utf-8")
        if first:
            os.link(temporary, run_dir / CLAIM_FILE)
        else:
            os.replace(temporary, run_dir / CLAIM_FILE)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of the directory itself, which needs no file. Do without it where the file system has no locks."""
    descriptor = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        [f"run.dir: another start has been deciding about {run_dir} for {LOCK_S:.0f} s; try again"]
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        yield
    finally:
        os.close(descriptor)
