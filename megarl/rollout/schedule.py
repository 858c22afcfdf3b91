"""The schedule of a run: every event that changed its admission, in order, as JSON lines in RUN_DIR/schedule.jsonl.

A line has the name of the event, what came from outside (versions, finished groups, how a step ended) and what
admission decided (groups that may start, batches). The latter follows from the former: `schedule_replay.py` checks it.
Each attempt of a run begins with a line `begin`, which holds the history that it resumes: of what is recorded before
it, only the steps of that history still count.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megarl.config.pace import Pace
from megarl.rollout.admission import Admission
from megarl.rollout.counters import Taken

SCHEDULE_FILE = "schedule.jsonl"

Event = dict[str, Any]


class RecordedAdmission(Admission):
    """An admission that hands every event which has changed it to `record`, as JSON content."""

    def __init__(
        self, groups: int, pace: Pace, *, refill: int = 0, capacity: int | None = None, steps: int | None = None,
        max_uses: int = 1, record: Callable[[Event], None],
    ) -> None:  # fmt: skip
        super().__init__(groups, pace, refill=refill, capacity=capacity, steps=steps, max_uses=max_uses)
        self._record = record

    def _if_reusing(self, **values: object) -> Event:
        """Return what an event has only in runs in which groups may be used again."""
        return values if self.max_uses > 1 else {}

    def load_state_dict(self, state: dict[str, Any], attempts: int = 0) -> None:
        """See `Admission.load_state_dict`. An attempt of the run begins with it."""
        super().load_state_dict(state, attempts)
        settings = {"groups": self.groups, "refill": self.refill, "capacity": self.capacity, "steps": self.steps}
        begin = {"event": "begin", **settings, "pace": asdict(self.pace), "state": state, "attempts": attempts}
        self._record(begin | self._if_reusing(max_uses=self.max_uses))

    def announce(self, version: int) -> None:
        """See `Admission.announce`."""
        super().announce(version)
        self._record({"event": "announce", "version": version})

    def set_version(self, version: int) -> None:
        """See `Admission.set_version`."""
        super().set_version(version)
        self._record({"event": "set_version", "version": version})

    def admit(self) -> list[int]:
        """See `Admission.admit`. Calls that start nothing change nothing."""
        groups = super().admit()
        if groups:
            self._record({"event": "admit", "groups": groups})
        return groups

    def keep(self, kept: Mapping[int, Set[int]]) -> list[int]:
        """See `Admission.keep`."""
        started = super().keep(kept)
        found = [[group, sorted(versions)] for group, versions in kept.items()]
        self._record({"event": "keep", "kept": found, "started": started})
        return started

    def hold(self, base: tuple[int, int], held: Mapping[int, Taken]) -> None:
        """See `Admission.hold`."""
        super().hold(base, held)
        taken = [{"step": step, **asdict(each)} for step, each in sorted(held.items())]
        for each in taken:  # JSON has no numbers as keys
            each["oldest"] = sorted(each["oldest"].items())
            each["reused"] = sorted((group, use["oldest"], use["uses"]) for group, use in each["reused"].items())
        self._record({"event": "hold", "base": list(base), "taken": taken})

    def finish(self, group: int, ok: bool, versions: Iterable[int] = ()) -> None:
        """See `Admission.finish`."""
        present = sorted(set(versions))
        super().finish(group, ok, present)
        self._record({"event": "finish", "group": group, "ok": ok, "versions": present})

    def replace(self, group: int, versions: Iterable[int]) -> bool:
        """See `Admission.replace`. A group that must be queued is finished by the next call."""
        present = sorted(set(versions))
        replaced = super().replace(group, present)
        if replaced:
            self._record({"event": "replace", "group": group, "versions": present})
        return replaced

    def batch(self, step: int, *, needed: bool = True) -> tuple[list[int], list[int]] | None:
        """See `Admission.batch`. Only the call that takes the batch is an event."""
        known = step in self._taken
        batch = super().batch(step, needed=needed)
        if batch is not None and not known:
            ok, failed = batch
            event = {"event": "batch", "step": step, "ok": ok, "failed": failed, "replaced": self.replaced(step)}
            self._record(event | self._if_reusing(reused=self.reused(step)))
        return batch

    def commit(
        self, step: int, *, trained: int, filtered: int, dropped_stale: int, failed: int,
        reused: int = 0, trained_groups: Iterable[int] | None = None, ended: Mapping[str, Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        """See `Admission.commit`."""
        numbers = {"trained": trained, "filtered": filtered, "dropped_stale": dropped_stale, "failed": failed}
        groups = None if trained_groups is None else sorted(trained_groups)
        super().commit(step, **numbers, reused=reused, trained_groups=groups, ended=ended)
        uses = self._if_reusing(reused=reused, trained_groups=groups)
        self._record({"event": "commit", "step": step, **numbers, **uses})


class ScheduleFile:
    """Appends events to a file; each is in the file when `write` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._broken = False

    def write(self, event: Event) -> None:
        """Append an event. Raises OSError if that fails, which ends the run as a batch does that cannot be dumped."""
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
        """Close the file; the next event opens it again, or a new one if it was moved aside meanwhile."""
        file, self._file, self._broken = self._file, None, False
        if file is not None:
            with contextlib.suppress(OSError):  # of a line that has failed already
                file.close()


def _cut_incomplete_line(path: Path) -> None:
    """Remove what a killed process has left of its last line."""
    if path.is_file() and not (content := path.read_bytes()).endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
