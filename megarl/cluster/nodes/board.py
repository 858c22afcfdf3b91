"""What the nodes of a job tell each other: small files in RUN_DIR/launch/ID on the shared file system.

Each node writes one file, replaced atomically, with a counter that goes up while it lives; a node whose counter stands
still is lost. Judged by the reader's own clock, so clocks need not agree. The first failure is claimed exclusively.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from megarl.common.files import write_json

FAILURE_FILE = "failed.json"

State = Literal["running", "done"]


@dataclass(frozen=True)
class NodeRecord:
    """`endpoint`: where torchrun's rendezvous is, on the first trainer node."""

    index: int
    host: str
    address: str
    state: State
    beat: int
    endpoint: str = ""


@dataclass(frozen=True)
class NodeFailure:
    """Why the job ends: `node` is the host's name, as its user knows it."""

    node: str
    reason: str


class NodeBoard:
    """One launch's files, as one node (or the batch script) sees them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def post(self, record: NodeRecord) -> None:
        write_json(self._path(record.index), asdict(record))

    def read(self, index: int) -> NodeRecord | None:
        """None while that node has not started."""
        try:
            return NodeRecord(**json.loads(self._path(index).read_text()))
        except FileNotFoundError:
            return None

    def claim_failure(self, failure: NodeFailure) -> bool:
        """True if this is the job's first failure."""
        path = self.directory / FAILURE_FILE
        temporary = path.with_name(f".{FAILURE_FILE}.{failure.node}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(failure)))
        try:
            os.link(temporary, path)  # atomic and exclusive, with its content: nobody reads half a file
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def failure(self) -> NodeFailure | None:
        try:
            return NodeFailure(**json.loads((self.directory / FAILURE_FILE).read_text()))
        except FileNotFoundError:
            return None

    def _path(self, index: int) -> Path:
        return self.directory / f"node-{index}.json"


class Watch:
    """Finds nodes whose counter stands still for `timeout_s`; nodes that have not started count from the first look."""

    def __init__(
        self, board: NodeBoard, indices: list[int], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self._board, self._timeout_s, self._clock = board, timeout_s, clock
        self._seen: dict[int, tuple[int, float]] = {index: (-1, clock()) for index in indices}

    def lost(self) -> list[tuple[int, NodeRecord | None]]:
        """Nodes that are neither done nor heard of for too long, with what they said last."""
        now, found = self._clock(), []
        for index, (beat, since) in list(self._seen.items()):
            record = self._board.read(index)
            if record is not None and (record.state == "done" or record.beat != beat):
                self._seen[index] = (record.beat, now)
            elif now - since > self._timeout_s:
                found.append((index, record))
        return found
