"""The claim on a run directory: the holder and its restarts have it, and others only after its end."""

import errno
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import msgspec
import pytest

from megarl.common.errors import ConfigError
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_lock as claims
from megarl.common.rundir.run_lock import CLAIM_FILE, Holder, Sighting, await_claim, claim, other_holder, refuse_claimed
from tests.support.checkpoints.tree import tree_of
from tests.support.waiting import wait_until

OWN = Holder.here("torchrun", ProcessId.own())
NODE_S = 30.0


@pytest.fixture
def other() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """`other()` is a process of this host that runs; it is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def one() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        return started[-1]

    yield one
    for each in started:
        each.kill()
        each.wait(timeout=10)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "RENEW_S", 0.05)


@dataclass
class Clock:
    """A clock that only sleeps advance. `at_sleep`: called after each one, as another host would act."""

    now: float = 1e6
    at_sleep: Callable[[], object] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.at_sleep()


def elsewhere(launch: str | None = None) -> Holder:
    """A holder on another host, whose pid means nothing here."""
    return replace(OWN, host="node-7", place="node-7/boot/1", launch=launch)


def test_a_living_run_on_this_host_is_named_and_nothing_is_changed(
    tmp_path: Path, other: Callable[[], subprocess.Popen[bytes]]
) -> None:
    process = other()
    claim(tmp_path, Holder.here("torchrun", ProcessId.of(process.pid)), NODE_S)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    before = tree_of(tmp_path)
    message = (
        rf"in use by torchrun \(pid {process.pid} on .*since .*nothing was changed.*touch {re.escape(str(tmp_path))}"
    )
    with pytest.raises(ConfigError, match=message):
        claim(tmp_path, OWN, NODE_S)
    with pytest.raises(ConfigError, match=message):
        refuse_claimed(tmp_path)
    assert tree_of(tmp_path) == before
    process.kill()
    process.wait(timeout=10)
    refuse_claimed(tmp_path)
    claim(tmp_path, OWN, node_s=60, say=lambda text: pytest.fail("waited"))  # a killed run is known to be gone at once


def test_the_same_command_starts_again_after_sigkill(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from megarl.common.rundir.run_lock import Holder, claim\n"
        "from megarl.common.process.processes import ProcessId\n"
        "claim(Path(sys.argv[1]), Holder.here('a run', ProcessId.own()), 60.0, sys.exit)\n"
        "print('claimed', flush=True)\n"
        "time.sleep(60)"
    )
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"claimed\n"
            assert holder_of(tmp_path).process.pid == process.pid
            process.kill()


def test_a_restart_of_the_ranks_of_one_agent_keeps_the_claim(tmp_path: Path) -> None:
    claim(tmp_path, OWN, NODE_S)
    before = (tmp_path / CLAIM_FILE).read_text()
    claim(tmp_path, replace(OWN, since="later"), NODE_S)
    assert (tmp_path / CLAIM_FILE).read_text() == before


def test_the_agent_of_a_launch_takes_over_from_its_script(
    tmp_path: Path, other: Callable[[], subprocess.Popen[bytes]]
) -> None:
    script = Holder.here("megarl launch", ProcessId.of(other().pid), "7-1")
    claim(tmp_path, script, NODE_S)
    agent = replace(OWN, what="megarl launch", launch="7-1")
    claim(tmp_path, agent, NODE_S)
    seen = Sighting.of(tmp_path)
    assert seen is not None and seen.holder == replace(agent, since=script.since)
    with pytest.raises(ConfigError, match=r"launch 7-1"):
        claim(tmp_path, replace(agent, launch="8-0"), NODE_S)
    await_claim(tmp_path, replace(OWN, launch="7-1"), timeout_s=1)
    with pytest.raises(
        TimeoutError, match=r"waited 0 s for its run to claim .*which megarl launch .*launch 7-1.* holds"
    ):
        await_claim(tmp_path, replace(OWN, launch="8-0"), timeout_s=0.1)


def test_a_wait_for_the_claim_goes_on_while_it_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path, OWN, NODE_S)
    real, failures = Sighting.of, [OSError(errno.ESTALE, "Stale file handle")] * 3

    def look(run_dir: Path) -> Sighting | None:
        if failures:
            raise failures.pop()
        return real(run_dir)

    monkeypatch.setattr(Sighting, "of", look)
    await_claim(tmp_path, OWN, timeout_s=30)
    assert not failures
    failures += [OSError(errno.ESTALE, "Stale file handle")] * 1000
    with pytest.raises(OSError, match="Stale"):
        await_claim(tmp_path, OWN, timeout_s=0.2)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces this module's clocks and sleeps: a sleep passes at once."""
    clock = Clock()
    monkeypatch.setattr(claims, "time", clock)
    return clock


def make(run_dir: Path, holder: Holder) -> None:
    """Write a claim as its holder has."""
    (run_dir / CLAIM_FILE).write_bytes(msgspec.json.encode(holder))


def holder_of(run_dir: Path) -> Holder:
    seen = Sighting.of(run_dir)
    assert seen is not None
    return seen.holder


def test_a_claim_of_another_host_is_respected_while_it_is_renewed(tmp_path: Path, clock: Clock) -> None:
    held = claim(tmp_path, elsewhere(), NODE_S)
    clock.at_sleep = lambda: os.utime(tmp_path / CLAIM_FILE)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"torchrun \(pid \d+ on node-7"):
        claim(tmp_path, OWN, NODE_S, said.append)
    assert len(said) == 1 and "waiting up to 30 s (timeouts.node_s)" in said[0]
    held.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("ago_s", "waits_s"), [(1e6, 0.0), (NODE_S, 0.0), (NODE_S / 2, NODE_S / 2), (0.0, NODE_S), (-1e6, NODE_S)]
)
def test_a_requeued_job_takes_over_from_a_host_that_is_silent(
    tmp_path: Path, clock: Clock, ago_s: float, waits_s: float
) -> None:
    """SLURM starts it on another host, with a launch id of its own, and the first host cannot give its claim up."""
    silent = claim(tmp_path, elsewhere("77-0"), NODE_S)
    os.utime(tmp_path / CLAIM_FILE, (0, os.stat(tmp_path / CLAIM_FILE).st_mtime - ago_s))
    began = clock.now
    requeued = replace(OWN, launch="77-1")
    claim(tmp_path, requeued, NODE_S)
    assert holder_of(tmp_path) == requeued and [path.name for path in tmp_path.iterdir()] == [CLAIM_FILE]
    assert clock.now - began == pytest.approx(waits_s, abs=2)
    # The other run, which was only suspended, finds out that it has lost the directory, and leaves it alone.
    taken = silent.renew()
    assert taken == requeued
    silent.release()
    assert holder_of(tmp_path) == requeued


def test_a_start_with_force_takes_the_directory_of_a_living_run(
    tmp_path: Path, other: Callable[[], subprocess.Popen[bytes]]
) -> None:
    running, said = other(), list[str]()
    held = claim(tmp_path, Holder.here("torchrun", ProcessId.of(running.pid)), NODE_S)

    def end_it(text: str) -> None:
        said.append(text)
        assert holder_of(tmp_path) == OWN and held.renew() == OWN  # as the holder finds out
        running.kill()
        running.wait()

    claim(tmp_path, OWN, NODE_S, end_it, force=True)
    assert len(said) == 1 and "is taken from torchrun" in said[0]


def test_a_claim_that_the_disk_does_not_take_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(holder: Holder) -> bytes:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(claims.msgspec.json, "encode", full)
        with pytest.raises(ConfigError, match="cannot be claimed"):
            claim(tmp_path, OWN, NODE_S)
    assert not list(tmp_path.iterdir()), "an empty claim would be one of an unknown run"


def test_a_run_that_has_lost_its_directory_is_reported(tmp_path: Path) -> None:
    lost: list[Holder] = []
    held = claim(tmp_path, elsewhere(), NODE_S)
    held.renew_in_background(lost.append)
    make(tmp_path, OWN)
    wait_until(lambda: len(lost) == 1, 10, "the holder to notice")
    assert lost[0].same_run(OWN)


@pytest.mark.parametrize("content", [b'{"what": "tor', b"\xff\xfe\x00", b""])
def test_a_claim_that_cannot_be_read_expires_like_one_of_another_host(
    tmp_path: Path, content: bytes, clock: Clock
) -> None:
    (tmp_path / CLAIM_FILE).write_bytes(content)
    assert other_holder(tmp_path, OWN) is None
    os.utime(tmp_path / CLAIM_FILE, (1, 1))
    claim(tmp_path, OWN, NODE_S)
    assert holder_of(tmp_path) == OWN


def test_a_claim_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    held = claim(tmp_path, OWN, NODE_S)
    (tmp_path / CLAIM_FILE).unlink()
    assert held.renew() is None and holder_of(tmp_path) == OWN


def test_a_failing_file_system_costs_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = claim(tmp_path, OWN, NODE_S)

    def stale(*args: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "utime", stale)
    for _ in range(3):
        assert held.renew() is None
    assert caplog.text.count("Stale file handle") == 1


def test_a_start_that_judged_a_dead_run_leaves_the_claim_of_the_start_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """Both find a dead run's claim; one has taken over when the other gets its turn."""
    make(tmp_path, replace(OWN, process=ProcessId(1, -1)))
    first = Holder.here("first", ProcessId.of(other().pid))
    lock = claims._locked

    def after_the_first(file: IO[bytes]) -> bool:
        monkeypatch.setattr(claims, "_locked", lock)
        claim(tmp_path, first, NODE_S)
        return lock(file)

    monkeypatch.setattr(claims, "_locked", after_the_first)
    with pytest.raises(ConfigError, match="in use by first"):
        claim(tmp_path, OWN, NODE_S)
    assert holder_of(tmp_path) == first and [path.name for path in tmp_path.iterdir()] == [CLAIM_FILE]


def test_a_directory_is_never_without_a_claim_while_it_changes_hands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Callable[[], subprocess.Popen[bytes]]
) -> None:
    """A third start that comes in the middle of a take-over waits its turn, and is refused."""
    make(tmp_path, replace(OWN, process=ProcessId(1, -1)))
    first = Holder.here("first", ProcessId.of(other().pid))
    refused: list[ConfigError] = []

    def third() -> None:
        with pytest.raises(ConfigError) as info:
            claim(tmp_path, OWN, NODE_S)
        refused.append(info.value)

    started = threading.Thread(target=third)
    real = claims.replace_file

    def replace_late(path: Path, content: bytes) -> None:
        started.start()
        assert not claims._create(tmp_path, OWN)
        real(path, content)

    monkeypatch.setattr(claims, "replace_file", replace_late)
    claim(tmp_path, first, NODE_S)
    started.join(timeout=60)
    assert len(refused) == 1 and "in use by first" in str(refused[0]) and holder_of(tmp_path) == first


def test_a_start_that_holds_the_lock_too_long_is_named(tmp_path: Path, clock: Clock) -> None:
    make(tmp_path, replace(OWN, process=ProcessId(1, -1)))
    with (tmp_path / CLAIM_FILE).open("r+b") as file:
        assert claims._locked(file)
        with pytest.raises(ConfigError, match=r"waited 30 s \(timeouts.node_s\) for another start .*remove .*claim"):
            claim(tmp_path, OWN, NODE_S)
    claim(tmp_path, OWN, NODE_S)
    assert holder_of(tmp_path) == OWN


def test_a_file_system_without_locks_costs_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", unsupported)
    make(tmp_path, replace(OWN, process=ProcessId(1, -1)))
    claim(tmp_path, OWN, NODE_S)
    assert holder_of(tmp_path) == OWN


def test_only_a_known_holder_that_is_another_run_is_another_holder(tmp_path: Path) -> None:
    assert other_holder(tmp_path, OWN) is None
    for mine, other in ((OWN, elsewhere()), (replace(OWN, launch="1"), elsewhere("2"))):
        make(tmp_path, mine)
        assert other_holder(tmp_path, mine) is None and other_holder(tmp_path, other) == mine


@pytest.mark.parametrize("before", [None, "a_dead_run"])
def test_of_many_starts_at_once_one_gets_the_directory(
    tmp_path: Path, other: Callable[[], subprocess.Popen[bytes]], before: str | None
) -> None:
    if before is not None:
        make(tmp_path, replace(OWN, process=ProcessId(1, -1)))
    starts = [Holder.here(f"start {i}", ProcessId.of(other().pid)) for i in range(4)]
    got: list[str] = []
    gate = threading.Barrier(len(starts))

    def start(mine: Holder) -> None:
        gate.wait(timeout=10)
        try:
            claim(tmp_path, mine, NODE_S)
        except ConfigError:
            return
        got.append(mine.what)

    threads = [threading.Thread(target=start, args=(mine,)) for mine in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert got == [holder_of(tmp_path).what]
