"""A file of lines in parts: names, positions, what is deleted, and where it is cut."""

from pathlib import Path

import pytest

from megarl.common.rundir import rotating_lines
from megarl.common.rundir.rotating_lines import cut, end, older_parts, parts, read_lines, rotate

LIMIT = 80  # eight parts of 10 bytes


def write(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three parts of 10 bytes, at 0, 10 and 20; the newest is `samples.jsonl`. Another file only looks like a part."""
    newest = tmp_path / "samples.jsonl"
    (tmp_path / "samples.old.jsonl").write_text("not a part\n")
    for number in range(3):
        write(newest, *(f"{number}{each:03d}" for each in range(2)))
        if number < 2:
            rotate(newest, LIMIT)
    return newest


def test_a_file_that_was_never_rotated_is_one_part(tmp_path: Path) -> None:
    alone = tmp_path / "samples.jsonl"
    assert (parts(alone), end(alone), list(read_lines(alone))) == ([], 0, [])
    write(alone, "a", "bc")
    assert parts(alone) == [(0, alone)] and end(alone) == 5
    assert list(read_lines(alone)) == ["a", "bc"] and list(read_lines(alone, 2)) == ["bc"]


def test_parts_are_named_by_their_offset_and_read_in_order(path: Path) -> None:
    names = [(begin, part.name) for begin, part in parts(path)]
    assert names == [
        (0, "samples.000000000000000.jsonl"),
        (10, "samples.000000000000010.jsonl"),
        (20, "samples.jsonl"),
    ]
    assert end(path) == 30
    assert list(read_lines(path)) == ["0000", "0001", "1000", "1001", "2000", "2001"]
    assert list(read_lines(path, 15)) == ["1001", "2000", "2001"] and list(read_lines(path, 30)) == []


def test_a_line_that_is_being_written_is_not_read(path: Path) -> None:
    with path.open("a") as file:
        file.write("half a li")
    assert list(read_lines(path, 20)) == ["2000", "2001"]


def test_the_oldest_parts_are_deleted_and_offsets_go_on(path: Path) -> None:
    for number in range(3, 20):
        rotate(path, LIMIT)
        write(path, f"{number}{'x' * 8}"[:9])
        assert sum(part.stat().st_size for _, part in parts(path)) <= LIMIT
    assert end(path) == 200 and [begin for begin, _ in parts(path)] == list(range(120, 200, 10))


@pytest.mark.parametrize("position", [30, 25, 20, 15, 10, 5, 0])
def test_bytes_after_a_position_are_cut_off(path: Path, position: int) -> None:
    with path.open("ab") as writer:  # open meanwhile, as the run's own file is
        cut(path, position)
        assert end(path) == position and len(list(read_lines(path))) == position // 5
        writer.write(b"next\n")
    assert list(read_lines(path))[-1] == "next" and len(list(read_lines(path))) == position // 5 + 1
    assert end(path) == position + 5
    cut(path, position)
    assert end(path) == position


def test_a_cut_before_all_that_is_kept_remembers_its_position(path: Path) -> None:
    older_parts(path)[0][1].unlink()
    cut(path, 5)
    assert end(path) == 5 and list(read_lines(path)) == []
    write(path, "next")
    rotate(path, LIMIT)
    assert [(begin, part.stat().st_size) for begin, part in parts(path)] == [(5, 5)]


def test_the_newest_bytes_are_cut_first(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed in the middle leaves a shorter file without a gap, and the next cut goes on."""

    def full(part: Path, size: int) -> None:
        raise OSError(part)

    with monkeypatch.context() as patched:
        path.unlink()  # as if killed between a rotation and the next line
        patched.setattr(rotating_lines.os, "truncate", full)
        with pytest.raises(OSError, match="samples"):
            cut(path, 5)
    assert list(read_lines(path)) == ["0000", "0001"] and end(path) == 10
    cut(path, 5)
    assert list(read_lines(path)) == ["0000"] and end(path) == 5
