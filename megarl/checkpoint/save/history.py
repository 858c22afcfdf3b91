"""Rolls a run's result files back to a checkpoint: moves later records to a file of rolled-back records."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

FILES = ("metrics.jsonl", "samples.jsonl")
ROLLED_BACK = "rolled_back.jsonl"


def positions(run_dir: Path) -> dict[str, int]:
    """Return the size of each result file in bytes. Every writer must have flushed."""
    return {name: (run_dir / name).stat().st_size for name in FILES if (run_dir / name).is_file()}


def roll_back(run_dir: Path, committed: Mapping[str, int]) -> int:
    """Truncate every result file at its committed position, and move the rest to rolled_back.jsonl.

    `committed`: positions in bytes, by file name; 0 if absent. A moved record has an additional field `file`, the name
    of its original file. An incomplete line, left by a killed process, is dropped. Returns the number of moved records.
    """
    moved = 0
    for name in FILES:
        path, position = run_dir / name, committed.get(name, 0)
        if not path.is_file() or path.stat().st_size <= position:
            continue
        with path.open("rb") as file:
            file.seek(position)
            tail = file.read().splitlines()
        with (run_dir / ROLLED_BACK).open("a", encoding="utf-8") as file:
            for line in tail:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                file.write(json.dumps({"file": name, **record}, ensure_ascii=False) + "\n")
                moved += 1
            file.flush()
            os.fsync(file.fileno())
        os.truncate(path, position)
    return moved
