"""The moment of a fault: an engine that works, one that is idle, one that is stopped in a publication; and damage."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks import soak_moments
from benchmarks.soak_checkpoints import complete, damage, refused
from benchmarks.soak_moments import catch, version_being_published
from benchmarks.soak_processes import is_stopped
from megarl.checkpoint.format.manifest import FileEntry, Manifest, check_files
from tests.support.waiting import wait_until


def schedule(run_dir: Path, *events: object, more: str = "") -> None:
    (run_dir / "schedule.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events) + more)


def announce(version: int) -> dict[str, object]:
    return {"event": "announce", "version": version}


def serve(version: int) -> dict[str, object]:
    return {"event": "set_version", "version": version}


def test_a_version_is_being_published_from_its_announcement_until_engines_serve_it(tmp_path: Path) -> None:
    assert version_being_published(tmp_path) is None
    schedule(tmp_path, {"event": "begin"}, announce(3))
    assert version_being_published(tmp_path) == 3
    admitted = {"event": "admit", "groups": list(range(100))}
    schedule(tmp_path, serve(1), announce(3), *[admitted] * 20)
    assert version_being_published(tmp_path) == 3
    schedule(tmp_path, announce(3), serve(3), admitted)
    assert version_being_published(tmp_path) is None
    schedule(tmp_path, announce(3), serve(3), more='{"event": "announce", "ver')
    assert version_being_published(tmp_path) is None, "that line is being written"
    schedule(tmp_path, announce(3), {"event": "begin"})
    assert version_being_published(tmp_path) is None, "another attempt has begun"
    schedule(tmp_path, announce(3), *[admitted] * 1000)
    assert version_being_published(tmp_path) is None, "it is far back: only the end is read"


@pytest.fixture
def engine() -> Iterator[psutil.Process]:
    started = subprocess.Popen(["sleep", "600"])
    yield psutil.Process(started.pid)
    started.kill()
    started.wait(10)


@pytest.mark.parametrize(("moment", "used"), [("idle", 0.0), ("busy", 0.05)])
def test_an_engine_is_caught_at_work_or_at_rest(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, used: float
) -> None:
    """The processor time that it uses while it is watched tells; in the third look it does what is waited for."""
    other = 0.05 - used
    seconds = iter([0.0, other, 1.0, 1.0 + other, 2.0, 2.0 + used, 3.0, 3.0 + other])
    for clock in ("cpu_seconds", "_scheduled_s"):
        monkeypatch.setattr(soak_moments, clock, lambda process: next(seconds))
    assert catch(moment, engine, tmp_path, lambda: False) and next(seconds) == 3.0


def test_an_engine_that_loads_weights_has_no_requests_for_that(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_moments, "_computes", lambda process: True)
    monkeypatch.setattr(soak_moments, "WAIT_S", {"busy": 0.5})
    schedule(tmp_path, announce(3))
    assert not catch("busy", engine, tmp_path, lambda: False)
    schedule(tmp_path, announce(3), serve(3))
    assert catch("busy", engine, tmp_path, lambda: False)


def test_an_engine_that_computes_is_told_from_one_that_sleeps(engine: psutil.Process) -> None:
    """Processes of their own, so that the clock is read too."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as computing:
        try:
            computes = psutil.Process(computing.pid)
            wait_until(lambda: soak_moments._computes(computes), 60, "the process to get a core")
            assert not any(soak_moments._computes(engine) for _ in range(5))
        finally:
            computing.kill()


@pytest.mark.parametrize("moment", ["busy", "idle", "in-sync"])
def test_a_moment_that_does_not_come_is_waited_for_until_its_time_or_the_run_is_over(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    counter = iter(range(10**6))
    monkeypatch.setattr(soak_moments, "cpu_seconds", lambda process: 0.0 if moment == "busy" else float(next(counter)))
    schedule(tmp_path, announce(3), serve(3))
    assert not catch(moment, engine, tmp_path, lambda: True)
    monkeypatch.setattr(soak_moments, "WAIT_S", {moment: 0.5})
    assert not catch(moment, engine, tmp_path, lambda: False) and not is_stopped([engine])


def test_an_engine_is_stopped_in_a_publication(engine: psutil.Process, tmp_path: Path) -> None:
    schedule(tmp_path, announce(4))
    assert catch("in-sync", engine, tmp_path, lambda: False) and is_stopped([engine])


def test_a_publication_that_ends_all_the_same_lets_the_engine_go_on(
    engine: psutil.Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is waited for."""
    seen = iter([(4, False), (None, True), (5, False), (5, True)])  # what is published, and whether the engine stands

    def published(run_dir: Path) -> int | None:
        version, stands = next(seen)
        assert is_stopped([engine]) == stands
        return version

    monkeypatch.setattr(soak_moments, "version_being_published", published)
    original = soak_moments.send

    def send(processes: list[psutil.Process], number: int) -> None:
        original(processes, number)
        wait_until(lambda: is_stopped(processes) == (number == signal.SIGSTOP), 30, "the signal")

    monkeypatch.setattr(soak_moments, "send", send)
    assert catch("in-sync", engine, tmp_path, lambda: False) and next(seen, None) is None


# --- checkpoints


def checkpoint(run_dir: Path, step: int) -> Path:
    path = run_dir / "checkpoints" / f"iter_{step:07d}"
    path.mkdir(parents=True)
    for rank in range(2):
        (path / f"__{rank}_0.distcp").write_bytes(random.Random(rank).randbytes(5000))
    names = sorted(each.name for each in path.iterdir())
    Manifest(step, {name: FileEntry.of(path / name) for name in names}).write(path)
    return path


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_found_by_the_digests(tmp_path: Path, seed: int) -> None:
    path = checkpoint(tmp_path, 5)
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    name = damage(path, random.Random(seed))
    assert [each.name for each in path.iterdir() if each.read_bytes() != before[each.name]] == [name]
    try:
        manifest = Manifest.read(path)
        assert check_files(path, manifest.files, manifest.files) or set(manifest.files) != set(before) - {
            "manifest.json"
        }
    except ValueError:
        assert name == "manifest.json"


def test_every_kind_of_file_is_damaged(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5)
    assert len({damage(path, random.Random(seed)) for seed in range(30)}) == 3


def test_complete_checkpoints_are_found_oldest_first(tmp_path: Path) -> None:
    assert complete(tmp_path / "checkpoints") == []
    found = [checkpoint(tmp_path, step) for step in (5, 10)]
    checkpoint(tmp_path, 15).rename(tmp_path / "checkpoints" / "iter_0000015.rolled_back")
    (tmp_path / "checkpoints" / ".iter_0000020.partial").mkdir()
    assert complete(tmp_path / "checkpoints") == found
    assert not refused(found[1])
    found[1].rename(found[1].with_name("iter_0000010.damaged"))
    assert refused(found[1]) and complete(tmp_path / "checkpoints") == found[:1]
