"""Reads files of JSON lines in a stream, also while they are written."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

T = TypeVar("T")

CHUNK_BYTES = 1 << 20  # that are read at a time
LONGEST_LINE = 16 << 20  # a longer one is left out and never held in memory


class JsonLines:
    """Reads the lines of one file, which may grow between two reads and during one.

    `begin` and `position`: the bytes at which the last line that was yielded begins, and at which the next one does.
    `torn`: how many lines were left out because they were too long, or not what the decoder expects.
    """

    def __init__(self, position: int = 0) -> None:
        self.begin = self.position = position
        self.torn = 0
        self._within = False  # a line that is too long

    def lines(self, file: BinaryIO, end: int | None = None) -> Iterator[bytes]:
        """Yield the lines that begin before `end`, by default the file's size now, and are complete.

        A line without its newline is being written, or its process was killed: the next read begins with it.
        """
        size = file.seek(0, 2)
        end = size if end is None else min(end, size)
        file.seek(self.position)
        held = b""
        while self.position + len(held) < size and self.position < end and (chunk := file.read(CHUNK_BYTES)):
            *complete, held = (held + chunk).split(b"\n")
            for line in complete:
                if self.position >= end:
                    return
                self.begin, self.position = self.position, self.position + len(line) + 1
                too_long, self._within = self._within, False
                if not too_long:
                    yield line
            if len(held) > LONGEST_LINE:
                self.torn += not self._within
                self.position, held, self._within = self.position + len(held), b"", True

    def decoded(self, file: BinaryIO, decoder: msgspec.json.Decoder[T], end: int | None = None) -> Iterator[T]:
        """Yield the content of those lines. Lines torn by a full disk or a kill are left out."""
        for line in self.lines(file, end):
            if (content := self.decode(line, decoder)) is not None:
                yield content

    def decode(self, line: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
        """Return the content of a line; None if it is not what the decoder expects."""
        try:
            return decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.torn += 1
            return None


def read_json_lines(
    path: Path, decoder: msgspec.json.Decoder[T], start: int = 0, end: int | None = None
) -> Iterator[tuple[int, T]]:
    """Yield (offset, content) of the lines of a file that begin in [start, end); nothing if there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    reader = JsonLines(start)
    with file:
        for content in reader.decoded(file, decoder, end):
            yield reader.begin, content
