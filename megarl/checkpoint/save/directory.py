"""The directory of a run's checkpoints: `iter_0000005/` for a complete one, other names for everything else.

A save writes into `.iter_0000005.partial`, which becomes `iter_0000005` by a rename once its manifest is there. What
the history has left behind is renamed, never deleted: `iter_0000007.rolled_back`, `iter_0000007.damaged`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl.checkpoint.format import faults
from megarl.checkpoint.format.manifest import MANIFEST, fsync_directory, write_durably
from megarl.common.processes import ProcessId, is_alive
from megarl.config.schema import Config
from megarl.models.source import TRACKER, step_name

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
CONFIG_FILE = "config.yaml"
_STEP = re.compile(r"iter_(\d{7,})")
_PARTIAL = re.compile(r"\.iter_\d{7,}\.(partial|deleted)")


class CheckpointDirectory:
    """One process (rank 0, and the export it starts) writes; `root` need not exist."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        return self.root / step_name(step)

    def partial(self, step: int) -> Path:
        """Where a save of `step` writes."""
        return self.root / f".{step_name(step)}.partial"

    def steps(self) -> list[int]:
        """Steps with a manifest, oldest first. Whether they are sound is not looked at."""
        if not self.root.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in found if match and (self.root / match[0] / MANIFEST).is_file())

    def begin(self, step: int) -> Path:
        """An empty directory for a save. OSError if the target is read-only or full."""
        self.sweep()
        partial = self.partial(step)
        partial.mkdir(parents=True)
        return partial

    def complete(self, step: int) -> Path:
        """The partial directory, manifest included, becomes the checkpoint of `step`."""
        path = self.path(step)
        if path.exists():
            self.set_aside(step, "replaced")
        faults.reached("rename")
        os.replace(self.partial(step), path)
        fsync_directory(self.root)
        self.write_tracker(step)
        return path

    def write_tracker(self, step: int) -> None:
        """Megatron's `latest_checkpointed_iteration.txt`; `auto` does not read it, other tools do."""
        write_durably(self.root / TRACKER, f"{step}\n".encode())

    def set_aside(self, step: int, why: str) -> Path:
        """Rename the directory of `step`, so that nothing takes it for a checkpoint of this history."""
        path, number = self.path(step), 0
        while (target := path.with_name(f"{path.name}.{why}{f'.{number}' if number else ''}")).exists():
            number += 1
        path.rename(target)
        return target

    def sweep(self) -> None:
        """Remove what interrupted saves and deletions have left."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if _PARTIAL.fullmatch(path.name):
                    shutil.rmtree(path)

    def delete(self, step: int) -> None:
        """Remove a checkpoint; one that is being deleted no longer looks like one."""
        obsolete = self.root / f".{step_name(step)}.deleted"
        os.replace(self.path(step), obsolete)
        faults.reached("retention")
        shutil.rmtree(obsolete)

    def state(self, step: int) -> dict[str, Any]:
        """The checkpoint's state.json."""
        content: dict[str, Any] = json.loads((self.path(step) / STATE_FILE).read_text())
        return content

    def lease(self, step: int, process: ProcessId) -> Path:
        """`process` (of this host) reads the checkpoint of `step`: retention keeps it while that process lives."""
        path = self.root / "leases" / f"{step}.{process.pid}.json"
        path.parent.mkdir(exist_ok=True)
        write_durably(path, json.dumps({"step": step, "process": asdict(process)}).encode())
        return path

    def leased(self) -> set[int]:
        """Steps with a living lease; leases of ended processes are removed."""
        steps = set()
        for path in self.root.glob("leases/*.json"):
            content = json.loads(path.read_text())
            if is_alive(ProcessId(**content["process"])):
                steps.add(int(content["step"]))
            else:
                path.unlink(missing_ok=True)
        return steps


def continues_history(config: Config) -> bool:
    """Whether the run that starts has a history of its own to go on from; what it finds is not verified here."""
    directory = CheckpointDirectory(config.checkpoint_dir)
    if config.checkpoint.resume == "auto":
        return bool(directory.steps())
    path = Path(config.checkpoint.resume).resolve()
    return config.checkpoint.resume != "never" and directory.root.resolve() in (path, path.parent)


def to_delete(
    steps: Collection[int], *, keep_last: int, keep_every: int, best: int | None, leased: Collection[int]
) -> list[int]:
    """Which complete checkpoints retention removes, oldest first.

    Kept: the last `keep_last`, every step divisible by `keep_every` (0: none), `best`, and what is `leased`.
    """
    if keep_last < 1:
        raise ValueError("keep_last must be at least 1: without the newest checkpoint there is nothing to resume from")
    newest = set(sorted(steps)[-keep_last:])
    kept = newest | set(leased) | ({best} if best is not None else set())
    return [step for step in sorted(steps) if step not in kept and not (keep_every and step % keep_every == 0)]


def best_step(values: dict[int, float], mode: str) -> int | None:
    """The step with the largest (`max`) or smallest (`min`) value, the earliest of equals; None without any."""
    if not values:
        return None
    sign = 1.0 if mode == "max" else -1.0
    return max(sorted(values), key=lambda step: sign * values[step])
