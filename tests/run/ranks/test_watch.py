"""Trainer ranks that show no sign of life, with a fake store and a fake clock; processes only where they are killed."""

import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common.process.processes import ProcessId, is_alive
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks import watch as rank_watch
from megarl.run.ranks.watch import (
    ENDED,
    INTERVAL_S,
    SILENT,
    SUSPECTS,
    RankWatch,
    SignBoard,
    Silences,
    SilentRank,
    Stamp,
    alive,
    encode,
    watch_ranks,
)
from tests.support.checkout import environment
from tests.support.waiting import wait_until

BOUND_S = 20.0
TIMEOUTS = TimeoutsConfig(node_s=BOUND_S, shutdown_s=3.0)
KEY = b"k" * 32


class FakeStore:
    """The store of rank 0. It counts requests, and the keys that they name."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.requests = self.keys = 0

    def set(self, key: str, value: str) -> None:
        self.requests, self.keys = self.requests + 1, self.keys + 1
        self.values[key] = value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests, self.keys = self.requests + 1, self.keys + len(keys)
        return [self.values[key] for key in keys]


class World:
    """Ranks on one or several hosts, which act one after the other every INTERVAL_S. Their pids are their numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, per_host: int) -> None:
        self.ranks, self.per_host = ranks, per_host
        self.store = FakeStore()
        self.now = 0.0
        self.silenced: set[int] = set()  # ranks whose threads do not act
        self.states: dict[int, str] = {}  # of main threads; S, which is waiting, if there is none
        self.acting = 0
        monkeypatch.setattr(rank_watch, "state_of", lambda process: self.states.get(process.pid, "S"))
        monkeypatch.setattr(rank_watch, "own_stamp", self._stamp)
        monkeypatch.setattr(rank_watch, "platform", SimpleNamespace(node=lambda: self.host_of(self.acting)))
        self.board = SignBoard(self.store, KEY)
        self.board.open(ranks)
        self.watches = [self.watch(rank) for rank in range(ranks)]

    def host_of(self, rank: int) -> str:
        return f"node-{rank // self.per_host}"

    def _stamp(self, beat: int, step: int | None) -> Stamp:
        return Stamp(self.host_of(self.acting), self.acting, 0, beat, step)

    def watch(self, rank: int) -> RankWatch:
        watch = RankWatch(rank, self.ranks, lambda: self.board, TIMEOUTS, lambda error: None, lambda: self.now)
        watch.follow(lambda: 7)
        return watch

    def stop(self, rank: int) -> None:
        self.silenced.add(rank)
        self.states[rank] = "T"

    def turn(self, seconds: float = INTERVAL_S) -> dict[int, SilentRank]:
        """Let time pass and each rank act that does not stay silent; return what each has found."""
        self.now += seconds
        found = {}
        for self.acting, watch in enumerate(self.watches):
            if self.acting not in self.silenced:
                if self.states.get(0) != "T":  # its store answers
                    watch.exchange(self.board)
                if (silent := watch.silent()) is not None:
                    found[self.acting] = silent
        return found

    def turns(self, seconds: float) -> dict[int, SilentRank]:
        """Let so much time pass, or less if a rank finds another one silent before."""
        until = self.now + seconds
        while self.now < until:
            if found := self.turn():
                return found
        return {}


MakeWorld = Callable[[int, int], World]


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> MakeWorld:
    """Make a world of so many ranks, so many of them on each host."""
    return lambda ranks, per_host: World(monkeypatch, ranks, per_host)


@pytest.mark.parametrize(
    ("ranks", "per_host", "victim", "finders"),
    [
        (2, 2, 1, {0}),
        (8, 4, 6, {0}),
        (8, 4, 0, {1, 2, 3, 4, 5, 6, 7}),  # its store does not answer
        (3, 1, 2, {0}),
        (2, 1, 0, {1}),
    ],
)
def test_a_rank_that_stops_is_named_after_the_bound_and_not_before(
    make_world: MakeWorld, ranks: int, per_host: int, victim: int, finders: set[int]
) -> None:
    world = make_world(ranks, per_host)
    assert world.turns(100) == {}
    world.stop(victim)
    assert world.turns(BOUND_S) == {}
    found = world.turns(3 * INTERVAL_S)
    assert found.keys() == finders
    for silent in found.values():
        assert silent.rank == victim and BOUND_S < silent.seconds <= BOUND_S + 2 * INTERVAL_S
        host = world.host_of(victim)
        text = f"trainer rank {victim} on {host} has been silent for {silent.seconds:.0f} s after step 7: "
        assert silent.describe().startswith(text) and "timeouts.node_s" in silent.describe()


def test_a_machine_that_was_suspended_wakes_up_with_nobody_silent(make_world: MakeWorld) -> None:
    """The clock may go on meanwhile, and after it one rank is the last to act."""
    world = make_world(4, 4)
    for _ in range(50):
        assert world.turn(3600.0) == {}
    world.silenced.add(2)
    assert world.turn(3600.0) == {} and world.turns(BOUND_S / 2) == {}
    world.silenced.clear()
    assert world.turns(10 * BOUND_S) == {}


@pytest.mark.parametrize("state", ["R", "D"])
@pytest.mark.parametrize("silent", [{1, 2}, {0}, {4, 5, 6}, {0, 1, 2, 4, 5, 6}])
def test_a_rank_that_computes_or_waits_for_a_disk_in_one_call_is_not_silent(
    make_world: MakeWorld, state: str, silent: set[int]
) -> None:
    """Its threads cannot act while the call keeps Python's lock. Another rank of its host vouches for it.

    Also for rank 0: its store needs no Python to answer.
    """
    world = make_world(8, 4)
    world.turns(10)
    world.silenced |= silent
    world.states |= dict.fromkeys(silent, state)
    assert world.turns(10 * BOUND_S) == {}
    first = min(silent)
    world.stop(first)
    found = world.turns(2 * BOUND_S)
    assert {each.rank for each in found.values()} == {first}


def test_a_rank_is_watched_from_its_first_stamp_to_its_end(make_world: MakeWorld) -> None:
    """Imports may take long on one node; and the last rank to end may need longer than the others."""
    world = make_world(4, 4)
    world.silenced.add(3)
    assert world.turns(10 * BOUND_S) == {}, "it has not begun"
    world.silenced.clear()
    world.turns(10)
    world.board.post(alive(3), ENDED)
    world.silenced.add(3)
    assert world.turns(10 * BOUND_S) == {}, "it has ended"


def test_a_connection_that_breaks_is_no_silence(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may have ended before the others: torchrun knows its exit code."""
    monkeypatch.setattr(rank_watch, "INTERVAL_S", 0.001)
    world = make_world(2, 1)
    world.turns(10)
    watch = world.watches[1]
    found: list[SilentRank | None] = []

    def refused() -> SignBoard:
        world.now += 1.0
        found.append(watch.silent())
        raise RuntimeError("The client socket has failed to connect")

    watch._connect = refused
    keeper = threading.Thread(target=watch._keep_exchanging)
    keeper.start()
    try:
        wait_until(lambda: len(found) > 3 * BOUND_S, 60, "many attempts to connect")
    finally:
        watch.close()
        keeper.join(30)
    assert set(found) == {None}


def test_what_no_rank_of_the_run_has_signed_is_no_sign_of_life(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(2, 1)
    world.turns(10)
    world.stop(1)
    stranger = SignBoard(world.store, b"x" * 32)
    found: dict[int, SilentRank] = {}
    for beat in range(20):
        stranger.post(alive(1), encode(Stamp("node-1", 1, 0, beat, 7)))
        for name in (SILENT, SUSPECTS):
            stranger.post(name, "no JSON")
        found = found or world.turn()
    assert found[0].rank == 1
    assert "was not written by a process of this run" in caplog.text
    assert world.watches[0]._reported is None


GAPS = st.lists(st.integers(1, 4), max_size=20)  # looks from one stamp of a rank to the next one
PAUSES = st.lists(st.floats(INTERVAL_S, 10**6), min_size=1, max_size=40)  # seconds from one look to the next one


@given(ranks=st.lists(GAPS, min_size=1, max_size=4), pauses=PAUSES)
def test_silence_is_the_time_of_the_looks_without_a_new_stamp(ranks: list[list[int]], pauses: list[float]) -> None:
    """Whatever the clock does between two looks, a look counts as INTERVAL_S at least and as twice of it at most."""
    now, looks = 0.0, max(map(sum, ranks)) + 12
    silences = Silences(lambda: now)
    beats = [newest_stamps(gaps, looks) for gaps in ranks]
    for look in range(looks):
        now += pauses[look % len(pauses)]
        silences.look({rank: (stamp(each[look]), "") for rank, each in enumerate(beats)})
        silent = {each.rank: each for each in silences.longer_than(-1.0)}
        assert [each.seconds for each in silent.values()] == sorted((s.seconds for s in silent.values()), reverse=True)
        for rank, each in enumerate(beats):
            old = look - each.index(each[look])
            assert old * INTERVAL_S * 0.999 <= silent[rank].seconds <= old * INTERVAL_S * 2.001
            assert silent[rank].last.beat == each[look]
    assert len(silences.longer_than(11 * INTERVAL_S * 0.999)) == len(ranks), "all have stopped for good"


def newest_stamps(gaps: list[int], looks: int) -> list[int]:
    """The number of the newest stamp at each look; the last one stays."""
    beats = [beat for beat, gap in enumerate(gaps) for _ in range(gap)]
    return [*beats, *[len(gaps)] * (looks - len(beats))]


def stamp(beat: int) -> str:
    return encode(Stamp("node-0", 1, 0, beat, None))


@dataclass
class Ended:
    """The acts of a watch at the end, in their order."""

    acts: list[Any] = field(default_factory=list)
    exited: threading.Event = field(default_factory=threading.Event)

    def attach(self, watch: RankWatch, note: Callable[[], object]) -> None:
        def end(code: int) -> None:
            self.acts.append(("exit", code))
            self.exited.set()

        watch._sleep = lambda seconds: self.acts.append(("sleep", seconds, note()))
        watch._exit = end
        watch._report = lambda error: self.acts.append(("report", str(error), note()))


@pytest.mark.parametrize("host", ["here", "elsewhere"])
def test_the_silent_rank_is_reported_then_killed_where_it_runs_and_all_ranks_end(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 finds it; rank 1 is notified, and reports nothing. Neither waits longer than `timeouts.shutdown_s`."""
    monkeypatch.setattr(rank_watch, "INTERVAL_S", 0.01)
    victim = subprocess.Popen(["sleep", "300"])
    process = ProcessId.of(victim.pid)
    board = SignBoard(FakeStore(), KEY)
    board.open(3)
    name = platform.node() if host == "here" else "node-7"
    board.post(alive(2), encode(Stamp(name, process.pid, process.start_time, 1, None)))
    ends = []
    watches = []
    timeouts = TimeoutsConfig(node_s=1.0, shutdown_s=3.0)
    try:
        for rank in (0, 1):
            watch = RankWatch(rank, 3, lambda: board, timeouts, lambda error: None)
            ends.append(Ended())
            ends[rank].attach(watch, lambda: is_alive(process))
            watches.append(watch)
            watch.start()
        for end in ends:
            assert end.exited.wait(60)
        kept = host == "elsewhere"
        (_, text, alive_then), slept, exited = ends[0].acts
        assert "trainer rank 2 on " in text and "while it was starting" in text
        assert alive_then, "the others must not report the end of a connection before"
        assert slept[:2] == ("sleep", 3.0) and exited == ("exit", 1)
        assert [act[:2] for act in ends[1].acts] == [("sleep", 3.0), ("exit", 1)]
        if kept:
            assert is_alive(process), "it is a process of another host that has this number there"
        else:
            assert victim.wait(timeout=60) == -9
    finally:
        for watch in watches:
            watch.close()
        victim.kill()
        victim.wait()


RANK_0 = """
import sys, time
from pathlib import Path
from megarl.common.trust.signed_store import serve_store
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks import watch as rank_watch
rank_watch.INTERVAL_S = 0.05
store = serve_store("127.0.0.1", 0, 30)
watch = rank_watch.watch_ranks((store.host, store.port), Path(sys.argv[1]), TimeoutsConfig(node_s=30), print)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_stopped_rank_0_is_found_although_a_request_to_its_store_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives up waiting for a key after the time of a request, and then waits without bound for the answer."""
    monkeypatch.setattr(rank_watch, "INTERVAL_S", 0.05)
    found: list[str] = []
    ended = threading.Event()
    timeouts = TimeoutsConfig(node_s=3.0, shutdown_s=0.1)
    command = [sys.executable, "-c", RANK_0, str(tmp_path)]
    with subprocess.Popen(command, env=environment(RANK="0", WORLD_SIZE="2"), stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        try:
            address = ("127.0.0.1", int(first.stdout.readline()))
            monkeypatch.setenv("RANK", "1")
            monkeypatch.setenv("WORLD_SIZE", "2")
            watch = watch_ranks(address, tmp_path, timeouts, lambda error: found.append(str(error)))
            watch._exit = lambda code: ended.set()
            wait_until(lambda: bool(watch._signs.get(0, ("",))[0]), 60, "a stamp of rank 0")
            assert found == []
            first.send_signal(signal.SIGSTOP)
            assert ended.wait(60)
            assert first.wait(timeout=60) == -signal.SIGKILL
        finally:
            first.kill()
    watch.close()
    [text] = found
    assert text.startswith(f"trainer rank 0 on {platform.node()} has been silent for ")
