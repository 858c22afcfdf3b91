"""Decides which checkpoints of a run stay: the newest, every so many steps' one, and the best one."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.config.schema.job import CheckpointConfig


class CheckpointRetention:
    """Deletes the checkpoints that a run need not keep. On rank 0."""

    def __init__(
        self, directory: CheckpointDirectory, settings: CheckpointConfig, report: Callable[[str], None]
    ) -> None:
        """`report`: takes a line for the user about what has failed."""
        self._directory, self._settings, self._report = directory, settings, report

    def apply(self, newest: int) -> None:
        """Delete what is not kept, up to the step `newest`. A failure is only reported: it costs only space."""
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
        """Add an evaluation of the newest checkpoint, which is that of `step`, and compare it with the others.

        A failure is only reported: it costs the comparison. An earlier evaluation that cannot be read is replaced.
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
        """Return the metric of every checkpoint that has a readable value of it."""
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
    """Return the complete checkpoints that retention deletes, oldest first.

    It keeps the last `keep_last`, every step divisible by `keep_every` (0: none), and `best`.

    Raises:
        ValueError: `keep_last` is below 1.
    """
    if keep_last < 1:
        raise ValueError("keep_last must be at least 1: without the newest checkpoint no resume is possible")
    newest = set(sorted(steps)[-keep_last:])
    kept = newest | ({best} if best is not None else set())
    return [step for step in sorted(steps) if step not in kept and not (keep_every and step % keep_every == 0)]


def best_step(values: dict[int, float]) -> int | None:
    """Return the step with the largest value, the earliest of equals; None if empty."""
    return max(sorted(values), key=lambda step: values[step], default=None)
