"""The tail of metrics.jsonl, whenever it is read, cut, torn or replaced."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cli.top import run_view
from megarl.cli.top.run_view import StepRow, recent_rows
from megarl.common.rundir import rotating_lines
from megarl.telemetry.sinks.sinks import JsonlSink


def step(number: int, start: int = 0) -> StepRow:
    return {"step": number, "time/step": 1.0, "start": start}


def evaluation(number: int, start: int = 0) -> StepRow:
    return {"step": number, "eval/a/greedy": 0.5, "start": start}


def line(row: StepRow) -> bytes:
    return json.dumps(row).encode() + b"\n"


def test_lines_that_are_torn_or_being_written_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert recent_rows(path) == []
    path.write_bytes(line(step(1)) + line(evaluation(1)) + b"torn\n[1]\n" + line(step(2)) + line(step(3))[:-5])
    assert recent_rows(path) == [step(1), evaluation(1), step(2)]


def test_of_a_large_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "TAIL_BYTES", 10 * len(line(step(1000))) + 7)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step(number)) for number in range(1000, 3000)))
    assert [row["step"] for row in recent_rows(path)] == list(range(2990, 3000))


def test_rows_are_followed_into_new_parts(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", 8 * 3 * len(line(step(10))))
    for number in range(10, 100):
        sink.write_object(step(number))
        steps = [row["step"] for row in recent_rows(sink.path)]
        assert steps == list(range(number + 1 - len(steps), number + 1)) and len(steps) >= min(3, number - 9), number
    oldest = rotating_lines.parts(sink.path)[0][0]
    rotating_lines.cut(sink.path, oldest + 4 * len(line(step(10))))  # as a resume cuts it
    sink.write_object(step(83, 1))
    assert [row["step"] for row in recent_rows(sink.path)][-2:] == [82, 83]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30))
def test_of_steps_that_are_done_again_the_later_ones_stay(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, bool]]
) -> None:
    made = [step(number, at) if is_step else evaluation(number, at) for at, (number, is_step) in enumerate(order)]
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_bytes(b"".join(map(line, made)))
    rows = recent_rows(path)
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    only_steps = [row["step"] for row in rows if "time/step" in row]
    assert len(set(only_steps)) == len(only_steps)
    assert not made or rows[-1] == made[-1]
