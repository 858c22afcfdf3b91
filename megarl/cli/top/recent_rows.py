"""The newest lines of metrics.jsonl, followed while the run writes, begins new parts, rolls back and resumes."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import BinaryIO

import msgspec

from megarl.common.rundir import rotating_lines
from megarl.common.rundir.json_lines import JsonLines

StepRow = dict[str, float | None]

TAIL_BYTES = 4 << 20  # that are read at first: some hundred steps
MOST_ROWS = 512
_DECODER = msgspec.json.Decoder(StepRow)
IS_STEP = "time/step"  # which a line of a step has, and one of an evaluation has not


class RecentRows:
    """The newest rows of a file that another process appends to, cuts and replaces, and of its older parts.

    `rows`: the oldest first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._offset = 0  # which part is read
        self._lines = JsonLines()
        self.rows: deque[StepRow] = deque(maxlen=MOST_ROWS)

    def poll(self) -> None:
        """Read what is new. A file that cannot be read now says nothing; a line that is being written waits."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._lines.position:
                    self._begin(facts)
                self._read(file)
        except OSError:
            return

    def _begin(self, newest: os.stat_result) -> None:
        """Read the older parts up to the newest one: what is new of them, or the end of a history that is another one.

        `newest`: the facts of the newest part, which is read next.
        """
        older = rotating_lines.older_parts(self._path)
        # The number of a deleted file is used again, but not for a part with the same offset.
        known = {(offset, part.stat().st_ino): number for number, (offset, part) in enumerate(older)}
        if (number := known.get((self._offset, self._inode))) is not None:  # what was the newest part is an older one
            unread = older[number:]
        else:
            self.rows.clear()
            unread = older[-1:] if newest.st_size < TAIL_BYTES else []
            self._lines = JsonLines(
                sum(max(0, each.stat().st_size - TAIL_BYTES + newest.st_size) for _, each in unread)
            )
        for _, part in unread:
            with part.open("rb") as file:
                self._read(file)
            self._lines = JsonLines()
        self._inode, self._lines = newest.st_ino, JsonLines(max(0, newest.st_size - TAIL_BYTES))
        self._offset = older[-1][0] + older[-1][1].stat().st_size if older else 0

    def _read(self, file: BinaryIO) -> None:
        """Add what is new in a part. Where reading began in the middle of a line, that is left out, as a torn one."""
        for row in self._lines.decoded(file, _DECODER):
            if row.get("step") is not None:
                add(self.rows, row)


def add(rows: deque[StepRow], row: StepRow) -> None:
    """Append a row. A run that has resumed does steps again, so what an earlier start has of them goes.

    An evaluation has the step after which it is written, so it follows the line of that step.
    """
    step = row["step"] or 0.0
    while rows and ((last := rows[-1]["step"] or 0.0) > step or (last == step and IS_STEP in row)):
        rows.pop()
    rows.append(row)
