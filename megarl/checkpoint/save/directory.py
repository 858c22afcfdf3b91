"""The directory of a run's checkpoints: `iter_0000005/` for a complete one, other names for everything else.

A save writes into `.iter_0000005.partial`, which becomes `iter_0000005` after its manifest is written. A checkpoint
that is damaged or not part of the run's history is renamed and never deleted:
`iter_0000007.rolled_back`, `iter_0000007.replaced`, `iter_0000007.damaged`.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from megarl.checkpoint.format.manifest import MANIFEST, fsync, write_durably
from megarl.config.schema.job import CheckpointConfig
from megarl.models.hf.model_files import TRACKER, step_name

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
EVALUATION_FILE = "evaluation.json"
CONFIG_FILE = "config.yaml"
_STEP = re.compile(r"iter_(\d{7,})")
_PARTIAL = re.compile(r"\.iter_\d{7,}\.(partial|deleted)")


class CheckpointDirectory:
    """The checkpoints under `root`, which need not exist. Only rank 0 writes."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Return the directory of the complete checkpoint of `step`."""
        return self.root / step_name(step)

    def partial(self, step: int) -> Path:
        """Return the directory into which a save of `step` writes."""
        return self.root / f".{step_name(step)}.partial"

    def steps(self) -> list[int]:
        """Return the steps with a manifest, oldest first. Their files are not verified."""
        if not self.root.is_dir():
            return []
        found = (_STEP.fullmatch(path.name) for path in self.root.iterdir())
        return sorted(int(match[1]) for match in found if match and (self.root / match[0] / MANIFEST).is_file())

    def create_partial(self, step: int) -> Path:
        """Create and return an empty directory for a save. Raises OSError if the disk is read-only or full."""
        self.sweep()
        partial = self.partial(step)
        partial.mkdir(parents=True)
        return partial

    def complete(self, step: int) -> Path:
        """Rename the partial directory, with its manifest, to the checkpoint of `step`. Return its path."""
        path = self.path(step)
        if path.exists():
            self.set_aside(step, "replaced")
        os.replace(self.partial(step), path)
        fsync(self.root)
        self.write_tracker(step)
        return path

    def write_tracker(self, step: int) -> None:
        """Write Megatron's `latest_checkpointed_iteration.txt`, for other tools; `resume: auto` does not read it."""
        write_durably(self.root / TRACKER, f"{step}\n".encode())

    def set_aside(self, step: int, why: str) -> Path:
        """Rename the checkpoint of `step`, so that it no longer belongs to this history. Return the new path."""
        path, number = self.path(step), 0
        while (target := path.with_name(f"{path.name}.{why}{f'.{number}' if number else ''}")).exists():
            number += 1
        path.rename(target)
        return target

    def sweep(self) -> None:
        """Delete the directories left by interrupted saves and deletions."""
        if self.root.is_dir():
            for path in self.root.iterdir():
                if _PARTIAL.fullmatch(path.name):
                    shutil.rmtree(path)

    def delete(self, step: int) -> None:
        """Delete a checkpoint. It is renamed first, so that an incomplete deletion is not taken for a checkpoint."""
        obsolete = self.root / f".{step_name(step)}.deleted"
        os.replace(self.path(step), obsolete)
        shutil.rmtree(obsolete)

    def state(self, step: int) -> dict[str, Any]:
        """Return the content of the checkpoint's state.json."""
        content: dict[str, Any] = json.loads((self.path(step) / STATE_FILE).read_text())
        return content

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of the checkpoint's evaluation, {} without one. OSError or ValueError if unreadable."""
        later = self.path(step) / EVALUATION_FILE
        try:
            content = json.loads(later.read_text()) if later.is_file() else self.state(step).get("metrics", {})
            return {name: float(value) for name, value in content.items()}
        except (AttributeError, TypeError) as error:
            raise ValueError(f"they are not numbers by name: {error}") from error

    def add_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation that ended after the save. Raises OSError.

        They have a separate file that the manifest does not list, so it cannot make the checkpoint invalid.
        """
        write_durably(self.path(step) / EVALUATION_FILE, json.dumps(metrics, indent=1).encode() + b"\n")


class CheckpointRetention:
    """Deletes the checkpoints that a run need not keep. On rank 0."""

    def __init__(
        self, directory: CheckpointDirectory, settings: CheckpointConfig, report: Callable[[str], None]
    ) -> None:
        """`report`: takes a line for the user about a failure."""
        self._directory, self._settings, self._report = directory, settings, report

    def apply(self, newest: int) -> None:
        """Delete what is not kept, up to step `newest`. A failure is only reported: it costs only space."""
        try:
            steps = self._directory.steps()
            metric = self._settings.keep_best
            values = self._values(steps, metric) if metric else {}
            best = best_step(values)
            obsolete = to_delete(
                [step for step in steps if step <= newest],
                keep_last=self._settings.keep_last,
                keep_every=self._settings.keep_every,
                best=best,
            )
            for step in obsolete:
                self._directory.delete(step)
        except (OSError, ValueError, KeyError) as error:
            self._report(f"an old checkpoint could not be deleted: {error}")

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Add an evaluation to the newest checkpoint, that of `step`, and compare it with the others.

        A failure is only reported: it costs the comparison. An unreadable earlier evaluation is replaced.
        """
        present: dict[str, float] | None = None
        with suppress(OSError, ValueError):
            present = self._directory.metrics(step)
        if metrics == present:
            return
        try:
            self._directory.add_metrics(step, metrics)
        except OSError as error:
            self._report(f"the evaluation of step {step} could not be added to its checkpoint: {error}")
            return
        if self._settings.keep_best:
            self.apply(step)

    def _values(self, steps: list[int], metric: str) -> dict[int, float]:
        """Return the metric of every checkpoint with a readable value."""
        found = {}
        for step in steps:
            try:
                value = self._directory.metrics(step).get(metric)
            except (OSError, ValueError) as error:
                self._report(f"the metrics of {self._directory.path(step)} cannot be read: {error}")
                continue
            if value is not None:
                found[step] = value
        return found


def to_delete(steps: Collection[int], *, keep_last: int, keep_every: int, best: int | None) -> list[int]:
    """Return the checkpoints to delete, oldest first.

    Kept are the last `keep_last`, every step divisible by `keep_every` (0: none), and `best`.
    """
    newest = set(sorted(steps)[-keep_last:])
    kept = newest | ({best} if best is not None else set())
    return [step for step in sorted(steps) if step not in kept and not (keep_every and step % keep_every == 0)]


def best_step(values: dict[int, float]) -> int | None:
    """Return the step with the largest value, the earliest of equals; None if empty."""
    return max(sorted(values), key=lambda step: values[step], default=None)


def continues_history(root: Path, resume: str) -> bool:
    """Return whether a run with checkpoints in `root` and this `checkpoint.resume` resumes from one, unverified."""
    if resume == "auto":
        return bool(CheckpointDirectory(root).steps())
    path = Path(resume).resolve()
    return resume != "never" and root.resolve() in (path, path.parent)
