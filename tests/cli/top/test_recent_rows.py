"""The tail of metrics.jsonl: the same as reading it all, whenever it is read, cut, torn or replaced."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.cli.top import recent_rows
from megarl.cli.top.recent_rows import RecentRows, StepRow, add
from megarl.common.rundir import rotating_lines
from megarl.telemetry.sinks.sinks import JsonlSink


def step(number: int, start: int = 0) -> StepRow:
    return {"step": number, "time/step": 1.0, "start": start}


def evaluation(number: int, start: int = 0) -> StepRow:
    return {"step": number, "eval/a/greedy": 0.5, "start": start}


def line(row: StepRow) -> bytes:
    return json.dumps(row).encode() + b"\n"


def test_rows_come_once_and_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = RecentRows(path)
    rows.poll()
    assert list(rows.rows) == []
    path.write_bytes(line(step(1)) + line(evaluation(1)) + line(step(2))[:-5])
    rows.poll()
    assert list(rows.rows) == [step(1), evaluation(1)]
    with path.open("ab") as file:
        file.write(line(step(2))[-5:] + b"torn\n[1]\n" + line(step(3)))
    rows.poll()
    rows.poll()
    assert list(rows.rows) == [step(1), evaluation(1), step(2), step(3)]


def test_a_run_that_resumes_replaces_what_it_does_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step(number)) for number in range(1, 7)) + line(evaluation(6)))
    rows = RecentRows(path)
    rows.poll()
    with path.open("r+b") as file:  # as a resume cuts it
        file.truncate(len(b"".join(line(step(number)) for number in range(1, 4))))
    rows.poll()
    assert [row["step"] for row in rows.rows] == [1, 2, 3]
    with path.open("ab") as file:
        file.write(line(step(4, 1)))
    rows.poll()
    assert list(rows.rows)[-1] == step(4, 1)


def test_of_a_large_file_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_rows, "TAIL_BYTES", 10 * len(line(step(1000))) + 7)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step(number)) for number in range(1000, 3000)))
    rows = RecentRows(path)
    rows.poll()
    assert [row["step"] for row in rows.rows] == list(range(2990, 3000))


def test_rows_are_followed_into_new_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many parts have begun between two looks, and in the first look too."""
    monkeypatch.setattr(recent_rows, "TAIL_BYTES", 5 * len(line(step(10))) + 1)
    sink = JsonlSink(tmp_path / "metrics.jsonl", 8 * 3 * len(line(step(10))))
    rows = RecentRows(sink.path)
    for number in range(10, 100):
        sink.write_object(step(number))
        if number in (10, 12, 13, 18, 24, 25, 36):  # a part has 3 steps: 12, 18, 24 and 36 are the last of one
            rows.poll()
            assert [row["step"] for row in rows.rows] == list(range(10, number + 1)), number
    for late in (rows, RecentRows(sink.path)):  # the part that was read last is deleted; the newest one is empty
        late.poll()
        assert [row["step"] for row in late.rows] == [97, 98, 99]
    sink.write_object(step(100))
    rows.poll()
    oldest = rotating_lines.parts(sink.path)[0][0]
    rotating_lines.cut(sink.path, oldest + 4 * len(line(step(10))))  # as a resume cuts it
    rows.poll()
    assert [row["step"] for row in rows.rows] == [82], "the newest part that is left has one line"
    sink.write_object(step(83, 1))
    rows.poll()
    assert [row["step"] for row in rows.rows] == [82, 83]


@given(
    st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30),
    st.lists(st.integers(1, 40), max_size=12),
)
def test_however_it_is_cut_into_reads_the_rows_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, bool]], cuts: list[int]
) -> None:
    made = [step(number, at) if is_step else evaluation(number, at) for at, (number, is_step) in enumerate(order)]
    content = b"".join(map(line, made))
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_bytes(b"")
    rows, position = RecentRows(path), 0
    for size in [*cuts, len(content)]:
        with path.open("ab") as file:
            file.write(content[position : position + size])
        position += size
        rows.poll()
    whole: deque[StepRow] = deque(maxlen=recent_rows.MOST_ROWS)
    for row in made:
        add(whole, row)
    assert rows.rows == whole
    steps = [row["step"] for row in whole]
    assert steps == sorted(steps)
    only_steps = [row["step"] for row in whole if "time/step" in row]
    assert len(set(only_steps)) == len(only_steps)
    assert not made or made[-1] in whole
