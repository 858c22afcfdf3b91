"""Result files go back with the run: what was written after the checkpoint leaves them, marked as rolled back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

FILES = ("metrics.jsonl", "samples.jsonl")
ROLLED_BACK = "rolled_back.jsonl"


def positions(run_dir: Path) -> dict[str, int]:
    """Bytes that each result file holds now; every writer has flushed."""
    return {name: (run_dir / name).stat().st_size for name in FILES if (run_dir / name).is_file()}


def roll_back(run_dir: Path, committed: Mapping[str, int]) -> int:
    """Cut every result file at its committed position; what follows goes to rolled_back.jsonl. Returns its lines.

    A record there is the original one with `file`: where it was. A line that a kill has cut short is dropped.
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
