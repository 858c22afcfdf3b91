"""Files of lines that are being written, damaged or far too long."""

import io
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.common.rundir import json_lines
from megarl.common.rundir.json_lines import JsonLines, read_json_lines

LINES = st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=12)


def read(reader: JsonLines, content: bytes, end: int | None = None) -> list[tuple[int, bytes]]:
    return [(reader.begin, line) for line in reader.lines(io.BytesIO(content), end)]


@given(LINES, st.binary(max_size=9), st.integers(1, 40), st.lists(st.integers(0, 400), max_size=4))
@settings(deadline=None)
def test_every_complete_line_comes_once_with_its_place(
    lines: list[bytes], rest: bytes, chunk: int, sizes: list[int]
) -> None:
    """In however many reads, while the file grows."""
    content = b"".join(line + b"\n" for line in lines) + rest.replace(b"\n", b"")
    reader, found = JsonLines(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "CHUNK_BYTES", chunk)
        for size in [*sorted(sizes), len(content)]:
            found += read(reader, content[:size])
    assert [line for _, line in found] == lines
    assert all(content[offset:].startswith(line + b"\n") for offset, line in found)
    assert reader.position == sum(len(line) + 1 for line in lines) and reader.torn == 0


def test_what_is_no_complete_line_of_numbers_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1.0}\n{"a": \x00\x00\n\n["no object"]\n{"a": null}\n\xff\xfe\n{"a": 2.0')
    decoder = msgspec.json.Decoder(dict[str, float | None])
    assert list(read_json_lines(path, decoder)) == [(0, {"a": 1.0}), (35, {"a": None})]
    assert list(read_json_lines(tmp_path / "absent", decoder)) == []
    reader = JsonLines()
    with path.open("rb") as file:
        assert len(list(reader.decoded(file, decoder))) == 2 and reader.torn == 4


def test_a_line_without_end_is_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "CHUNK_BYTES", 100)
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 1000)
    content = b"first\n" + b"x" * 50_000 + b"\nlast\n" + b"y" * 50_000
    reader = JsonLines()
    assert read(reader, content[:20_000]) == [(0, b"first")] and reader.torn == 1
    assert read(reader, content) == [(50_007, b"last")] and reader.torn == 2
    assert read(reader, content + b"\nnew\n") == [(len(content) + 1, b"new")] and reader.torn == 2


def test_only_lines_that_begin_in_the_window_are_read() -> None:
    assert read(JsonLines(5), b"aaaa\nbbbb\ncccc\ndddd\n", 11) == [(5, b"bbbb"), (10, b"cccc")]
