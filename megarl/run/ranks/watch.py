"""Ends a run if a trainer rank shows no sign of life, and names that rank, so that torchrun can restart all.

A rank may be stopped, hang while it holds Python's lock, or lose its host. The others would then wait in a collective
for the longest time that a healthy run may need. So a thread of each rank posts a stamp every INTERVAL_S. Rank 0, which
also serves the store, reads all stamps, and the others read that of rank 0, so requests grow linearly with the number
of ranks. A rank that is silent for `timeouts.node_s` is reported as the run's failure and announced to all ranks. Ranks
on its host kill it, and all end.

A healthy rank posts nothing while its main thread computes or waits for a disk in one long call that holds Python's
lock. After half of the bound the other ranks of its host check this in /proc, and vouch for it. Silence is measured by
a clock that stops while the watcher is suspended, so after a suspend no rank counts as silent. A rank that only makes
no progress still posts stamps: the bounds of collectives and of calls to the pool end its run.
"""

import logging
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
from torch.distributed import TCPStore

from megarl.common.clocks import RateLimit, WatchedTime
from megarl.common.errors import NotAuthentic
from megarl.common.process.processes import ProcessId, kill, state_of
from megarl.common.trust.run_secret import derived_key, run_secret
from megarl.common.trust.signed_store import connect_store, sign, verify
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks.control_group import StoreAddress

logger = logging.getLogger(__name__)

# Names of what is announced to all ranks: suspects, the longest silent first, and the rank that ends the run.
SUSPECTS, SILENT = "suspects", "silent rank"
COMPLAIN_S = 30.0  # between two log lines about the same trouble
ENDED = "ended"  # the stamp of a rank that waits for no other


def alive(rank: int) -> str:
    """Return the name of a rank's stamp."""
    return f"alive/{rank}"


def busy(rank: int) -> str:
    """Return the name under which others on the same host vouch for a rank: its main thread computes."""
    return f"busy/{rank}"


@dataclass(frozen=True)
class Stamp:
    """The facts that a rank posts of itself. `beat` increases by 1 with each stamp; `step`: None at its start."""

    host: str
    pid: int
    start_time: int
    beat: int
    step: int | None

    @property
    def process(self) -> ProcessId:
        """The identity of the rank's process on its host."""
        return ProcessId(self.pid, self.start_time)


@dataclass(frozen=True)
class SilentRank:
    """A rank that was silent for `seconds`, with its last stamp."""

    rank: int
    seconds: float
    last: Stamp

    def describe(self) -> str:
        """Return the reason why the run ends."""
        when = "while it was starting" if self.last.step is None else f"after step {self.last.step}"
        return (
            f"trainer rank {self.rank} on {self.last.host} has been silent for {self.seconds:.0f} s {when}: its "
            f"process ({self.last.pid}) or its host is stopped or hangs. The bound is timeouts.node_s"
        )


def encode(shown: Stamp | Sequence[SilentRank]) -> str:
    """Return a stamp, or silent ranks, as JSON."""
    return msgspec.json.encode(shown).decode()


def decode(text: str) -> list[SilentRank]:
    """Return the ranks that `encode` gave as `text`; [] for ""."""
    return msgspec.json.decode(text, type=list[SilentRank]) if text else []


class SignBoard:
    """One rank's connection to the store. A value that no rank of this run has signed is ignored."""

    def __init__(self, store: TCPStore, key: bytes) -> None:
        self._store, self._key = store, key
        self._complaints = RateLimit(COMPLAIN_S)

    def open(self, world: int) -> None:
        """Set every name, on rank 0, so that no rank waits for one."""
        for name in (SUSPECTS, SILENT, *(make(rank) for rank in range(world) for make in (alive, busy))):
            self._store.set(name, "")

    def post(self, name: str, text: str) -> None:
        """Set the text of a name."""
        self._store.set(name, sign(self._key, name, text))

    def read(self, names: Sequence[str]) -> dict[str, str]:
        """Return the texts of names, "" where there is none, in one request."""
        values = self._store.multi_get(list(names))
        return {name: self._text(name, value) for name, value in zip(names, values, strict=True)}

    def _text(self, name: str, value: bytes) -> str:
        if not value:
            return ""
        try:
            return verify(self._key, name, value)
        except NotAuthentic as error:
            if self._complaints.allows():
                logger.warning("%s", error)
            return ""


def own_stamp(beat: int, step: int | None) -> Stamp:
    """Return a stamp of this process."""
    process = ProcessId.own()
    return Stamp(platform.node(), process.pid, process.start_time, beat, step)


INTERVAL_S = 2.0  # between two stamps of a rank, and between two looks
CONNECT_S = 5.0  # for a new connection to the store
MOST_SUSPECTS = 64  # that are announced at once; those without a witness come first
COMPUTES = ("R", "D")  # states of a main thread that computes, or waits for a disk

Sign = tuple[str, str]  # a rank's stamp, and what else is known of it: any change is a sign of life


class SilentRankError(RuntimeError):
    """A trainer rank showed no sign of life for `timeouts.node_s`."""


class Silences:
    """Measures how long each rank has been silent, by the watcher's own clock, from its first sign on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._time = WatchedTime(2 * INTERVAL_S, clock)
        self._last: dict[int, tuple[Sign, float]] = {}
        self._now = 0.0

    def look(self, signs: Mapping[int, Sign]) -> None:
        """Record what each rank shows now. An ended rank is no longer watched."""
        now = self._now = self._time.look()
        for rank, shown in signs.items():
            if shown[0] == ENDED:
                self._last.pop(rank, None)
            elif shown[0] and (rank not in self._last or self._last[rank][0] != shown):
                self._last[rank] = (shown, now)

    def longer_than(self, seconds: float) -> list[SilentRank]:
        """Return the ranks that have been silent for longer, the longest first."""
        silent = [(self._now - since, rank, stamp) for rank, ((stamp, _), since) in self._last.items()]
        silent = sorted(each for each in silent if each[0] > seconds)[::-1]
        return [SilentRank(rank, silence, msgspec.json.decode(stamp, type=Stamp)) for silence, rank, stamp in silent]


class RankWatch:
    """Shows that this rank lives, and watches others. With one rank it does nothing."""

    def __init__(
        self,
        rank: int,
        world: int,
        connect: Callable[[], SignBoard],
        timeouts: TimeoutsConfig,
        report: Callable[[SilentRankError], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connect`: opens a connection to the ranks' store. `report`: gets the reason why the run ends."""
        self._rank, self._world, self._connect, self._report = rank, world, connect, report
        self._watched = range(1, world) if rank == 0 else range(1)
        self._bound_s, self._shutdown_s = timeouts.node_s, timeouts.shutdown_s
        self._step: Callable[[], int | None] = lambda: None
        self._beat = 0
        self._signs: dict[int, Sign] = {}
        self._silences = Silences(clock)
        self._suspects: list[SilentRank] = []  # by this rank
        self._found: SilentRank | None = None  # by this rank
        self._reported: SilentRank | None = None  # by another one
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._complaints = RateLimit(COMPLAIN_S)
        self._exit: Callable[[int], object] = os._exit
        self._sleep: Callable[[float], object] = time.sleep

    def start(self) -> None:
        """Begin to show signs of life, and to watch."""
        if self._world > 1:
            # Two threads: a store whose process is stopped does not answer, which the other one notices.
            for name, work in (("rank-signs", self._keep_exchanging), ("rank-watch", self._keep_watching)):
                thread = threading.Thread(target=work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def follow(self, step: Callable[[], int]) -> None:
        """Put the number of finished steps, from `step`, into the stamps."""
        self._step = step

    def close(self) -> None:
        """Announce that this rank ends, and stop watching. Call it when it waits for no rank."""
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * CONNECT_S)

    def exchange(self, board: SignBoard) -> None:
        """Post this rank's signs and read those of the ranks that it watches."""
        self._beat += 1
        board.post(alive(self._rank), encode(own_stamp(self._beat, self._step())))
        if self._rank == 0:
            board.post(SUSPECTS, encode(self._suspects[:MOST_SUSPECTS]))
        if self._found is not None:
            board.post(SILENT, encode([self._found]))
        names = [name(rank) for rank in self._watched for name in (alive, busy)]
        texts = board.read([SUSPECTS, SILENT, *names])
        self._signs = {rank: (texts[alive(rank)], texts[busy(rank)]) for rank in self._watched}
        for reported in decode(texts[SILENT]):
            self._reported = reported if self._found is None else None
        for suspect in {each.rank: each for each in [*decode(texts[SUSPECTS]), *self._suspects]}.values():
            if suspect.last.host == platform.node() and state_of(suspect.last.process) in COMPUTES:
                board.post(busy(suspect.rank), f"{self._rank}/{self._beat}")

    def silent(self) -> SilentRank | None:
        """Return the rank whose silence ends the run, if there is one. Call it every INTERVAL_S."""
        self._silences.look(self._signs)
        self._suspects = self._silences.longer_than(self._bound_s / 2)
        return next((each for each in self._suspects if each.seconds > self._bound_s), None)

    def _keep_exchanging(self) -> None:
        board: SignBoard | None = None
        while True:
            try:
                board = board or self._connect()
                self.exchange(board)
            except Exception as error:
                # A broken connection is not silence: rank 0 has ended, which torchrun sees, or the network failed.
                board = None
                self._signs = {rank: (stamp, f"unknown since {self._beat}") for rank, (stamp, _) in self._signs.items()}
                if not self._closed.is_set() and self._complaints.allows():
                    logger.warning("this rank could not show that it lives, trying again: %s", error)
            if self._closed.wait(INTERVAL_S):
                break
        if board is not None:
            try:
                board.post(alive(self._rank), ENDED)
            except RuntimeError as error:
                logger.info("rank 0 had ended before this rank: %s", error)

    def _keep_watching(self) -> None:
        while not self._closed.wait(INTERVAL_S):
            if self._reported is not None:
                self._end(self._reported)
                return
            if (silent := self.silent()) is not None:
                self._report(SilentRankError(silent.describe()))
                self._found = silent  # announced to the others from now on
                self._end(silent)
                return

    def _end(self, silent: SilentRank) -> None:
        """Kill the silent rank if it is on this host, and end this rank, at the latest after `timeouts.shutdown_s`."""
        logger.error("this rank ends: %s", silent.describe())
        if silent.last.host == platform.node():
            kill([silent.last.process], signal.SIGKILL)
        # gloo notices the end of a process, and the main thread then closes what it holds. NCCL does not notice.
        self._sleep(self._shutdown_s)
        self._exit(1)


def watch_ranks(
    address: StoreAddress, run_dir: Path, timeouts: TimeoutsConfig, report: Callable[[SilentRankError], object]
) -> RankWatch:
    """Return the watch of this rank, which has begun. `address`: of the store of all ranks, which rank 0 serves."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = address
    key = derived_key(run_secret(run_dir), f"signs of the ranks at {host}:{port}")
    # A late answer would count as a broken connection, so silence must be noticed before.
    request_s = 2 * timeouts.node_s + CONNECT_S
    opened = False

    def connect() -> SignBoard:
        nonlocal opened
        store = connect_store(host, port, CONNECT_S)
        store.set_timeout(timedelta(seconds=request_s))
        board = SignBoard(store, key)
        if rank == 0 and not opened:
            board.open(world)
            opened = True
        return board

    watch = RankWatch(rank, world, connect, timeouts, report)
    watch.start()
    return watch
