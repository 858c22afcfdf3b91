"""The schedule of a run: every change of its admission, in order, as JSON lines in RUN_DIR/schedule.jsonl.

Each line has the name of the event, its inputs (versions, finished groups, how a step ended) and admission's decision
(groups that may start, batches). Each attempt of a run begins with a line `begin`, which holds the history that it
resumes: of the lines before, only the steps of that history still count.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megarl.rollout.admission.counters import StepGroups

SCHEDULE_FILE = "schedule.jsonl"

Event = dict[str, Any]


def held_steps(held: Mapping[int, StepGroups]) -> list[Event]:
    """Return what steps have taken, as JSON content without integer keys."""
    taken = [{"step": step, **asdict(each)} for step, each in sorted(held.items())]
    for each in taken:
        each["oldest"] = sorted(each["oldest"].items())
        each["reused"] = sorted((group, use["oldest"], use["uses"]) for group, use in each["reused"].items())
    return taken


class ScheduleFile:
    """Appends events to a file; each is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._broken = False

    def write(self, event: Event) -> None:
        """Append an event. Raises OSError if that fails, which ends the run."""
        if self._broken:
            raise OSError(f"{self.path}: an earlier event could not be written")
        if self._file is None:
            _cut_incomplete_line(self.path)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        try:
            self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        except OSError:
            self._broken = True  # a later line must not follow a torn one
            raise

    def close(self) -> None:
        """Close the file; the next event reopens it, or opens a new one if it was moved aside."""
        file, self._file, self._broken = self._file, None, False
        if file is not None:
            with contextlib.suppress(OSError):  # `write` has already raised it
                file.close()


def _cut_incomplete_line(path: Path) -> None:
    """Remove the partial last line of a killed process."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
