"""Reads files of JSON lines in a stream, also while they are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 16 << 20  # a longer one is left out, so that it is never held


def complete_lines(path: Path, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) of the lines that begin in [start, end) and are complete; nothing if there is no file.

    A line without its newline, because it is being written or a process was killed, is left out, and so is one above
    `LONGEST_LINE`. `end`: by default the file's size when it is opened.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, 2)
        end = size if end is None else min(end, size)
        file.seek(start)
        held, offset = b"", start  # the beginning of a line, and where it is in the file
        too_long = False
        while offset < end and (chunk := file.read(CHUNK_BYTES)):
            lines = (held + chunk).split(b"\n")
            held = lines.pop()
            for line in lines:
                if offset >= end:
                    return
                if not too_long:
                    yield offset, line
                too_long = False
                offset += len(line) + 1
            if len(held) > LONGEST_LINE:
                offset, held, too_long = offset + len(held), b"", True


def decoded(
    path: Path, decoder: msgspec.json.Decoder[T], start: int = 0, end: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield (offset, content) of the complete lines in [start, end) that are what the decoder expects.

    Others, for example one of which a full disk took only a part, are left out.
    """
    for offset, line in complete_lines(path, start, end):
        try:
            yield offset, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
