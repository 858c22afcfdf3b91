"""Rolls a run's result files back to a checkpoint: moves later records to a file of rolled-back records.

A run may resume often, so that file is kept in parts, and the oldest ones are deleted
(`megarl/common/rundir/rotating_lines.py`).
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megarl.common.rundir import rotating_lines

FILES = ("metrics.jsonl", "samples.jsonl")
ROLLED_BACK = "rolled_back.jsonl"
ROLLED_BACK_BYTES = 1 << 30  # of all its parts


def positions(run_dir: Path) -> dict[str, int]:
    """Return the end of each result file in bytes, including older parts. Every writer must have flushed."""
    return {name: rotating_lines.end(run_dir / name) for name in FILES if rotating_lines.parts(run_dir / name)}


def roll_back(run_dir: Path, committed: Mapping[str, int]) -> int:
    """Truncate every result file at its committed position, and move the rest to rolled_back.jsonl.

    `committed`: positions in bytes, by file name; 0 if absent. Moved records get a field `file`, their file's name.
    Incomplete lines of killed processes are dropped. Returns the number of moved records.
    """
    moved = 0
    for name in FILES:
        path, position = run_dir / name, committed.get(name, 0)
        if rotating_lines.end(path) <= position:
            continue
        moved += _move(_records(path, position, name), run_dir / ROLLED_BACK)
        rotating_lines.cut(path, position)
    return moved


def _records(path: Path, position: int, name: str) -> Iterator[str]:
    """Yield the complete records from `position` on, as lines of rolled_back.jsonl."""
    for line in rotating_lines.read_lines(path, position):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        yield json.dumps({"file": name, **record}, ensure_ascii=False) + "\n"


def _move(lines: Iterator[str], target: Path) -> int:
    """Append lines, starting a new part whenever one is full. Return their number."""
    moved, more = 0, True
    while more:
        more = False
        with target.open("ab") as file:
            for line in lines:
                file.write(line.encode())
                moved += 1
                if more := file.tell() >= rotating_lines.part_bytes(ROLLED_BACK_BYTES):
                    break
            file.flush()
            os.fsync(file.fileno())
        if more:
            rotating_lines.rotate(target, ROLLED_BACK_BYTES)
    return moved
