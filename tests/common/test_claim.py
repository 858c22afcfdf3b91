"""The claim on a run directory: the holder and its restarts have it, and others only after its end."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.common import claim as claims
from megarl.common.claim import CLAIM_FILE, Holder, Sighting, await_claim, claim, judge, other_holder, refuse_claimed
from megarl.common.errors import ConfigError
from megarl.common.processes import ProcessId
from tests.support.tree import tree_of
from tests.support.waiting import wait_until

OWN = Holder.here("torchrun", ProcessId.own())
NODE_S = 1.0


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
    monkeypatch.setattr(claims, "WATCH_S", 0.25)
    monkeypatch.setattr(claims, "SETTLE_S", 0.2)


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
    told = rf"in use by torchrun \(pid {process.pid} on .*since .*nothing was changed.*touch {re.escape(str(tmp_path))}"
    with pytest.raises(ConfigError, match=told):
        claim(tmp_path, OWN, NODE_S)
    with pytest.raises(ConfigError, match=told):
        refuse_claimed(tmp_path)
    assert tree_of(tmp_path) == before
    process.kill()
    process.wait(timeout=10)
    refuse_claimed(tmp_path)
    started = time.monotonic()
    claim(tmp_path, OWN, node_s=60)
    assert time.monotonic() - started < 5  # a killed run is known to be gone at once


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


def test_a_claim_of_another_host_is_respected_while_it_is_renewed(tmp_path: Path) -> None:
    held = claim(tmp_path, elsewhere(), NODE_S)
    lost: list[Holder] = []
    held.renew_in_background(lost.append)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"torchrun \(pid \d+ on node-7"):
        claim(tmp_path, OWN, NODE_S, said.append)
    assert len(said) == 1 and "waiting up to 1 s (timeouts.node_s)" in said[0]
    assert not lost
    held.release()
    assert not (tmp_path / CLAIM_FILE).exists()


def test_a_claim_of_another_host_expires_after_its_silence(tmp_path: Path) -> None:
    silent = claim(tmp_path, elsewhere(), NODE_S)
    started = time.monotonic()
    claim(tmp_path, OWN, NODE_S)
    assert time.monotonic() - started >= 0.8 * NODE_S
    # The other run, which was only suspended, finds out that it has lost the directory, and leaves it alone.
    taken = silent.renew()
    assert taken is not None and taken.same_run(OWN)
    silent.release()
    assert (tmp_path / CLAIM_FILE).exists()


def test_a_run_that_has_lost_its_directory_is_told(tmp_path: Path) -> None:
    lost: list[Holder] = []
    held = claim(tmp_path, elsewhere(), NODE_S)
    held.renew_in_background(lost.append)
    (tmp_path / CLAIM_FILE).write_text(OWN.to_text())
    wait_until(lambda: len(lost) == 1, 10, "the holder to notice")
    assert lost[0].same_run(OWN)


@pytest.mark.parametrize("content", [b'{"what": "tor', b"\xff\xfe\x00", b""])
def test_a_claim_that_cannot_be_read_expires_like_one_of_another_host(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CLAIM_FILE).write_bytes(content)
    assert other_holder(tmp_path, OWN) is None
    os.utime(tmp_path / CLAIM_FILE, (1, 1))
    claim(tmp_path, OWN, NODE_S)
    seen = Sighting.of(tmp_path)
    assert seen is not None and seen.holder is not None and seen.holder.same_run(OWN)


def test_a_claim_that_was_deleted_is_written_again(tmp_path: Path) -> None:
    held = claim(tmp_path, OWN, NODE_S)
    (tmp_path / CLAIM_FILE).unlink()
    assert held.renew() is None and (tmp_path / CLAIM_FILE).exists()


def test_a_claim_that_was_deleted_and_made_by_another_start_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other start has been told that it is sure."""
    held = claim(tmp_path, OWN, NODE_S)
    (tmp_path / CLAIM_FILE).write_text(elsewhere().to_text())
    with monkeypatch.context() as patched:  # it was made just after the look
        patched.setattr(Sighting, "of", lambda run_dir: None)
        assert held.renew() is None
    other = held.renew()
    assert other is not None and other.same_run(elsewhere())


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


def test_without_locks_a_claim_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: object) -> None:
        raise OSError(errno.EBADF, "flock of a directory on NFS")

    monkeypatch.setattr(fcntl, "flock", none)
    claim(tmp_path, elsewhere(), NODE_S).release()
    assert other_holder(tmp_path, OWN) is None and not (tmp_path / CLAIM_FILE).exists()
    claim(tmp_path, OWN, NODE_S)
    assert other_holder(tmp_path, elsewhere()) == OWN


def test_a_lock_that_fails_for_another_reason_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(ConfigError, match=r"cannot be claimed: .*the disk is broken"):
        claim(tmp_path, OWN, NODE_S)
    assert not (tmp_path / CLAIM_FILE).exists()


@pytest.mark.parametrize("links", [True, False], ids=["links", "no_links"])
@pytest.mark.parametrize("before", [None, "a_dead_run"])
def test_of_two_starts_on_hosts_that_do_not_see_each_others_locks_one_gets_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None, links: bool
) -> None:
    """Both have found the directory free before either writes."""
    if before is not None:
        dead = replace(OWN, process=ProcessId(1, -1))
        (tmp_path / CLAIM_FILE).write_text(dead.to_text())
    starts = [OWN, elsewhere()]
    gate, outcomes = threading.Barrier(2), dict[str, str]()
    real_take, seen_by = claims._take, set[int]()

    def together(run_dir: Path, seen: Sighting | None, mine: Holder) -> claims.ClaimOutcome:
        if threading.get_ident() not in seen_by:
            seen_by.add(threading.get_ident())
            gate.wait(timeout=10)
        return real_take(run_dir, seen, mine)

    def no_link(*paths: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    def write(run_dir: Path, holder: Holder, *, first: bool = False) -> None:
        """Do as `_write` on two hosts, whose temporary files have different names."""
        temporary = run_dir / f".{holder.host}"
        temporary.write_text(holder.to_text())
        (os.link if first else os.replace)(temporary, run_dir / CLAIM_FILE)
        temporary.unlink(missing_ok=True)

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    monkeypatch.setattr(claims, "_take", together)
    monkeypatch.setattr(claims, "_write", write)
    monkeypatch.setattr(claims, "judge", lambda seen, *_, **__: "free" if len(seen_by) < 2 else "held")

    def start(mine: Holder) -> None:
        try:
            claim(tmp_path, mine, NODE_S)
        except ConfigError:
            outcomes[mine.host] = "refused"
        else:
            outcomes[mine.host] = "got it"

    threads = [threading.Thread(target=start, args=(mine,)) for mine in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(outcomes.values()) == ["got it", "refused"]
    seen = Sighting.of(tmp_path)
    assert seen is not None and seen.holder is not None and outcomes[seen.holder.host] == "got it"


def test_a_first_claim_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_settle", lambda *_: pytest.fail("waited"))
    claim(tmp_path, OWN, NODE_S)
    assert [path.name for path in tmp_path.iterdir()] == [CLAIM_FILE]


def test_only_a_known_holder_that_is_another_run_is_another_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other_holder(tmp_path, OWN) is None
    for mine, other in ((OWN, elsewhere()), (replace(OWN, launch="1"), elsewhere("2"))):
        (tmp_path / CLAIM_FILE).write_text(mine.to_text())
        assert other_holder(tmp_path, mine) is None and other_holder(tmp_path, other) == mine
    (tmp_path / CLAIM_FILE).write_text("{")
    assert other_holder(tmp_path, OWN) is None

    def stale(run_dir: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Sighting, "of", stale)
    assert other_holder(tmp_path, OWN) is None


def test_of_many_starts_at_once_one_gets_the_directory(
    tmp_path: Path, other: Callable[[], subprocess.Popen[bytes]]
) -> None:
    starts = [Holder.here(f"start {i}", ProcessId.of(other().pid)) for i in range(4)]
    got: list[str] = []
    gate = threading.Barrier(len(starts))

    def start(mine: Holder) -> None:
        gate.wait(timeout=10)
        try:
            claim(tmp_path / "run", mine, NODE_S)
        except ConfigError:
            return
        got.append(mine.what)

    threads = [threading.Thread(target=start, args=(mine,)) for mine in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    seen = Sighting.of(tmp_path / "run")
    assert len(got) == 1 and seen is not None and seen.holder is not None and seen.holder.what == got[0]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir: .*file/run cannot be claimed: .*Not a directory"):
        claim(tmp_path / "file" / "run", OWN, NODE_S)


@given(
    watched_s=st.floats(0, 300),
    age_s=st.floats(-1e5, 1e6),
    node_s=st.floats(1, 200),
    renewed=st.booleans(),
)
def test_a_claim_of_another_host_falls_only_after_a_silence_that_was_watched(
    watched_s: float, age_s: float, node_s: float, renewed: bool
) -> None:
    """Whatever the clocks say: a claim that is renewed is held, and one falls after `node_s` of watching at most."""
    first = Sighting(elsewhere(), 1)
    seen = Sighting(elsewhere(), 2 if renewed else 1)
    verdict = judge(seen, first, OWN, watched_s=watched_s, age_s=age_s, node_s=node_s)
    if renewed:
        assert verdict == "held"
    elif verdict == "free":
        assert watched_s >= min(claims.WATCH_S, node_s) and max(watched_s, age_s) >= node_s
    else:
        assert verdict == "unclear" and watched_s < node_s
