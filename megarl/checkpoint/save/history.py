"""Rolls a run's result files back to a checkpoint: moves later records to a file of rolled-back records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from megarl.common import line_parts

FILES = ("metrics.jsonl", "samples.jsonl")
ROLLED_BACK = "rolled_back.jsonl"


def positions(run_dir: Path) -> dict[str, int]:
    """Return the end of each result file in bytes, its older parts included. Every writer must have flushed."""
    return {name: line_parts.end(run_dir / name) for name in FILES if line_parts.parts(run_dir / name)}


def roll_back(run_dir: Path, committed: Mapping[str, int]) -> int:
    """Truncate every result file at its committed position, and move the rest to rolled_back.jsonl.

    `committed`: positions in bytes, by file name; 0 if absent. A moved record has an additional field `file`, the name
    of its original file. An incomplete line, left by a killed process, is dropped. Returns the number of moved records.
    """
    moved = 0
    for name in FILES:
        path, position = run_dir / name, committed.get(name, 0)
        if line_parts.end(path) <= position:
            continue
        with (run_dir / ROLLED_BACK).open("a", encoding="utf-8") as file:
            for line in line_parts.read_lines(path, position):
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                file.write(json.dumps({"file": name, **record}, ensure_ascii=False) + "\n")
                moved += 1
            file.flush()
            os.fsync(file.fileno())
        line_parts.cut(path, position)
    return moved
