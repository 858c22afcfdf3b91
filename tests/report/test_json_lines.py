"""Files of lines that are being written, damaged or far too long."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.report import json_lines
from megarl.report.json_lines import complete_lines, decoded


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"")), max_size=12), st.binary(max_size=9),
       st.integers(1, 40))  # fmt: skip
@settings(deadline=None)
def test_every_complete_line_comes_once_with_its_place(lines: list[bytes], rest: bytes, chunk: int) -> None:
    path = Path("/tmp") / "unused"
    content = b"".join(line + b"\n" for line in lines) + rest.replace(b"\n", b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "CHUNK_BYTES", chunk)
        patch.setattr(Path, "open", lambda *_: __import__("io").BytesIO(content))
        found = list(complete_lines(path))
    assert [line for _, line in found] == lines
    assert all(content[offset:].startswith(line + b"\n") for offset, line in found)


def test_what_is_no_complete_line_of_numbers_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1.0}\n{"a": \x00\x00\n\n["no object"]\n{"a": null}\n\xff\xfe\n{"a": 2.0')
    decoder = msgspec.json.Decoder(dict[str, float | None])
    assert [row for _, row in decoded(path, decoder)] == [{"a": 1.0}, {"a": None}]
    assert list(complete_lines(tmp_path / "absent")) == []


def test_a_line_without_end_is_never_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "CHUNK_BYTES", 100)
    monkeypatch.setattr(json_lines, "LONGEST_LINE", 1000)
    path = tmp_path / "lines"
    path.write_bytes(b"first\n" + b"x" * 50_000 + b"\nlast\n" + b"y" * 50_000)
    assert [(offset, line) for offset, line in complete_lines(path)] == [(0, b"first"), (50_007, b"last")]


def test_only_lines_that_begin_in_the_window_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"aaaa\nbbbb\ncccc\ndddd\n")
    assert [line for _, line in complete_lines(path, 5, 11)] == [b"bbbb", b"cccc"]
