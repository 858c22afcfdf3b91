"""The newest lines of metrics.jsonl, followed while the run writes, rolls back and resumes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

StepRow = dict[str, float | None]

TAIL_BYTES = 4 << 20  # that are read at first: some hundred steps
MOST_ROWS = 512
_CHUNK_BYTES = 16 << 20  # of new lines at a time
_DECODER = msgspec.json.Decoder(StepRow)
IS_STEP = "time/step"  # which a line of a step has, and one of an evaluation has not


class RecentRows:
    """The newest rows of a file that another process appends to, cuts and replaces. `rows`: the oldest first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._position = 0
        self.rows: deque[StepRow] = deque(maxlen=MOST_ROWS)

    def poll(self) -> None:
        """Read what is new. A file that cannot be read now says nothing; a line that is being written waits."""
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                if facts.st_ino != self._inode or facts.st_size < self._position:
                    self.rows.clear()
                    self._inode, self._position = facts.st_ino, max(0, facts.st_size - TAIL_BYTES)
                file.seek(self._position)
                read = file.read(_CHUNK_BYTES)
        except OSError:
            return
        complete = read[: read.rfind(b"\n") + 1]
        self._position += len(complete)
        for row in _decoded(complete.splitlines()):
            add(self.rows, row)


def _decoded(lines: Iterable[bytes]) -> Iterator[StepRow]:
    """Yield the rows among some lines: the first one may be cut, and others torn by a kill."""
    for line in lines:
        try:
            row = _DECODER.decode(line)
        except msgspec.MsgspecError:
            continue
        if row.get("step") is not None:
            yield row


def add(rows: deque[StepRow], row: StepRow) -> None:
    """Append a row. A run that has resumed does steps again, so what an earlier start has of them goes.

    An evaluation has the step after which it is written, so it follows the line of that step.
    """
    step = row["step"] or 0.0
    while rows and ((last := rows[-1]["step"] or 0.0) > step or (last == step and IS_STEP in row)):
        rows.pop()
    rows.append(row)
