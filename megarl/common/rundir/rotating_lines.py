"""Keeps a growing file of lines in parts of bounded size: the newest lines in FILE, older ones in numbered files.

`samples.jsonl` is the newest part. When it is full it is renamed to `samples.OFFSET.jsonl`. OFFSET counts the bytes of
all lines that were ever written before it, deleted ones included. So a position means the same before and after a
rotation. The newest part begins where the last numbered one ends.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

DIGITS = 15  # of an offset in a file name: names are in the order of their offsets up to 1 PB
PARTS = 8  # that together may have as many bytes as the limit


def older_parts(path: Path) -> list[tuple[int, Path]]:
    """Return the older parts of the file `path`, each with its offset, in the order in which they were written."""
    found = path.parent.glob(f"{path.stem}.{'[0-9]' * DIGITS}{path.suffix}")
    return sorted((int(part.name.split(".")[-2]), part) for part in found)


def parts(path: Path) -> list[tuple[int, Path]]:
    """Return all parts of the file `path` that exist, each with its offset, in the order in which they were written."""
    older = older_parts(path)
    return [*older, (_end(older), path)] if path.is_file() else older


def end(path: Path) -> int:
    """Return the position in bytes after the last line of all parts."""
    return _end(parts(path))


def read_lines(path: Path, position: int = 0) -> Iterator[str]:
    """Yield the lines of all parts that begin at `position` or later, in the order in which they were written.

    A line that is not complete, because it is being written or a process was killed, is left out.
    """
    for begin, part in parts(path):
        if begin + part.stat().st_size > position:
            with part.open("rb") as file:
                file.seek(max(0, position - begin))
                yield from (line[:-1].decode() for line in file if line.endswith(b"\n"))


def rotate(path: Path, limit: int) -> None:
    """Make the newest part an older one, and delete the oldest ones, so that all parts stay below `limit` bytes.

    The writer must begin a new file at `path`. The last of the older parts is always kept, because it says where the
    newest begins. Raises OSError; then the lines are still there, and the next rotation deletes what is too much.
    """
    path.rename(_part(path, end(path) - path.stat().st_size))
    delete_oldest([part for _, part in older_parts(path)], limit - part_bytes(limit))


def delete_oldest(files: Sequence[Path], most: int) -> None:
    """Delete the first of these files until all of them have `most` bytes at most; the last one is always kept."""
    sizes = [file.stat().st_size for file in files]
    for number, file in enumerate(files[:-1]):
        if sum(sizes[number:]) <= most:
            break
        file.unlink(missing_ok=True)


def part_bytes(limit: int) -> int:
    """Return the size at which a part is full, if all parts together may have `limit` bytes."""
    return max(1, limit // PARTS)


def cut(path: Path, position: int) -> None:
    """Delete all bytes from `position` on, the newest first: a process that is killed meanwhile leaves no gap.

    A writer may have the newest part open for appending; it stays the same file, and its next byte is at `position`.
    Nothing is done to a file that ends before.
    """
    older = older_parts(path)
    if path.is_file() and end(path) > position:
        os.truncate(path, max(0, position - _end(older)))
    if older and position < older[0][0]:  # all that is left was written later
        _part(path, position).touch()
    for begin, part in reversed(older):
        if begin <= position:
            if begin + part.stat().st_size > position:
                os.truncate(part, position - begin)
            break
        part.unlink()


def _part(path: Path, offset: int) -> Path:
    return path.with_name(f"{path.stem}.{offset:0{DIGITS}d}{path.suffix}")


def _end(found: list[tuple[int, Path]]) -> int:
    return found[-1][0] + found[-1][1].stat().st_size if found else 0
