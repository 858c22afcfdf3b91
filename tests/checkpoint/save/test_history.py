"""Result files go back with a run that resumes."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.checkpoint.save import history
from megarl.checkpoint.save.history import ROLLED_BACK, positions, roll_back
from megarl.common.rundir import rotating_lines
from megarl.telemetry.sinks.sinks import JsonlSink


def test_result_files_go_back_to_the_byte(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    committed = positions(tmp_path)
    before = metrics.read_bytes()
    with metrics.open("a") as file:
        file.write('{"step": 3, "policy/loss": 0.5}\n{"step": 4, "pol')  # the kill cut a line short
    (tmp_path / "samples.jsonl").write_text('{"step": 3}\n')  # was not there yet
    assert roll_back(tmp_path, committed) == 2
    assert metrics.read_bytes() == before and (tmp_path / "samples.jsonl").read_bytes() == b""
    assert [json.loads(line) for line in (tmp_path / ROLLED_BACK).read_text().splitlines()] == [
        {"file": "metrics.jsonl", "step": 3, "policy/loss": 0.5},
        {"file": "samples.jsonl", "step": 3},
    ]
    assert roll_back(tmp_path, committed) == 0


def test_older_parts_go_back_too(tmp_path: Path) -> None:
    sink, committed = JsonlSink(tmp_path / "samples.jsonl", 160), list[dict[str, int]]()  # parts of 20 bytes
    for number in range(6):
        committed.append(positions(tmp_path))
        sink.write_object({"step": number})
    sink.close()
    assert len(rotating_lines.parts(sink.path)) > 2 and committed[2] == {"samples.jsonl": 24}
    assert roll_back(tmp_path, committed[2]) == 4
    assert positions(tmp_path) == committed[2] and len(list(rotating_lines.read_lines(sink.path))) == 2
    moved = [json.loads(line) for line in (tmp_path / ROLLED_BACK).read_text().splitlines()]
    assert moved == [{"file": "samples.jsonl", "step": number} for number in range(2, 6)]


def test_the_records_of_many_resumes_are_bounded_and_the_newest_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "ROLLED_BACK_BYTES", 4000)
    metrics = tmp_path / "metrics.jsonl"
    for resume in range(100):
        metrics.write_text("".join(json.dumps({"step": 3 * resume + number}) + "\n" for number in range(3)))
        assert roll_back(tmp_path, {}) == 3
    kept = [json.loads(line)["step"] for line in rotating_lines.read_lines(tmp_path / ROLLED_BACK)]
    assert kept == list(range(kept[0], 300)) and kept[0] > 0
    assert 3000 < sum(path.stat().st_size for path in tmp_path.glob("rolled_back*.jsonl")) < 4100


def test_one_resume_that_moves_more_than_a_part_keeps_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "ROLLED_BACK_BYTES", 4000)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": number}) + "\n" for number in range(400)))
    assert roll_back(tmp_path, {}) == 400
    kept = [json.loads(line)["step"] for line in rotating_lines.read_lines(tmp_path / ROLLED_BACK)]
    assert kept == list(range(kept[0], 400)) and 0 < kept[0] < 350


# --- the samples of a run under kills, in the middle of a rotation or of a resume too

LIMIT = 640  # parts of 80 bytes
LONGEST = 70  # of a line


class Killed(BaseException):
    """Ends what a process does, as `kill -9` would."""


class SampleRun:
    """The samples of a run that writes, saves, is killed and resumes, and what its files should hold."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "samples.jsonl"
        self.lines: list[str] = []  # of the history, from its beginning
        self.may_be_gone: set[int] = set()  # numbers of the lines that the bound does not keep
        self.checkpoints: list[tuple[int, dict[str, int]]] = [(0, {})]
        self.written = 0
        self.sink = JsonlSink(self.path, LIMIT)

    def write(self, size: int) -> None:
        """Write one line, and note which older ones the bound no longer keeps."""
        self.written += 1
        content = {"number": self.written, "text": "x" * size}
        self.lines.append(json.dumps(content))
        total = sum(len(line) + 1 for line in self.lines)
        for number, line in enumerate(self.lines):
            if total > LIMIT - 2 * rotating_lines.part_bytes(LIMIT) - LONGEST:
                self.may_be_gone.add(number)
            total -= len(line) + 1
        self.sink.write_object(content)
        if self.path.stat().st_size == 0:  # a part has begun
            older = [part.stat().st_size for _, part in rotating_lines.older_parts(self.path)]
            assert sum(older) <= LIMIT - rotating_lines.part_bytes(LIMIT)

    def save(self) -> None:
        """Make a checkpoint."""
        self.checkpoints.append((len(self.lines), positions(self.directory)))

    def kill_in_a_line(self, size: int) -> None:
        """Leave an incomplete line."""
        with self.path.open("a") as file:
            file.write('{"number": 0, "text": "' + "x" * size)
        raise Killed

    def resume(self, chosen: int) -> None:
        """Start again from a checkpoint."""
        self.checkpoints = self.checkpoints[: 1 + chosen % len(self.checkpoints)]
        steps, committed = self.checkpoints[-1]
        self.sink = JsonlSink(self.path, LIMIT)
        roll_back(self.directory, committed)
        self.lines = self.lines[:steps]
        self.may_be_gone = {number for number in self.may_be_gone if number < steps}
        self.check()

    def check(self) -> None:
        """Compare the files with the history: its last lines, each once, and all that the bound keeps."""
        found = list(rotating_lines.read_lines(self.path))
        missing = len(self.lines) - len(found)
        assert rotating_lines.end(self.path) == sum(len(line) + 1 for line in self.lines)
        assert found == self.lines[missing:] and set(range(missing)) <= self.may_be_gone
        names = [part.name for part in self.directory.glob("samples*.jsonl")]
        assert sorted(names) == sorted(part.name for _, part in rotating_lines.parts(self.path))


def killed_after(calls: int, action: Callable[[], None]) -> bool:
    """Do `action`; kill it before it changes a file for the `calls`-th time. Return True if that came first."""
    left = calls

    def counted(original: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            nonlocal left
            if not left:
                raise Killed
            left -= 1
            return original(*arguments)

        return call

    patches = [mock.patch.object(Path, name, counted(getattr(Path, name))) for name in ("rename", "unlink", "touch")]
    patches.append(mock.patch.object(rotating_lines.os, "truncate", counted(rotating_lines.os.truncate)))
    try:
        for patch in patches:
            patch.start()
        action()
    except Killed:
        return True
    finally:
        for patch in patches:
            patch.stop()
    return False


EVENTS = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 30), st.integers(0, 3)),
    st.tuples(st.just("write"), st.integers(0, 30), st.just(99)),
    st.tuples(st.just("save"), st.just(0), st.just(99)),
    st.tuples(st.just("kill_in_a_line"), st.integers(0, 30), st.just(99)),
    st.tuples(st.just("resume"), st.integers(0, 99), st.integers(0, 6)),
)


@given(st.lists(EVENTS, min_size=10, max_size=120), st.integers(0, 99))
def test_samples_are_those_of_the_committed_history_whatever_was_killed_when(
    events: list[tuple[str, int, int]], last: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = SampleRun(Path(directory))
        for name, value, calls in events:
            arguments = () if name == "save" else (value,)
            if killed_after(calls, lambda name=name, arguments=arguments: getattr(run, name)(*arguments)):  # type: ignore[misc]
                run.resume(value + last)
        run.check()
        run.resume(last)
        run.save()
        for _ in range(30):
            run.write(20)
        run.resume(-1)
