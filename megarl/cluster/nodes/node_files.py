"""The messages between the nodes of a job: small files in RUN_DIR/launch/ID on the shared file system.

Each node replaces one file atomically, with a counter that increases while the node lives. A node whose counter stops
counts as lost. The reader measures this with its own clock, so clocks need not agree. Exactly one node claims the first
failure.
"""

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
    """The file of one node. `endpoint` is HOST:PORT of torchrun's rendezvous; only the first trainer node sets it."""

    index: int
    host: str
    address: str
    state: State
    beat: int
    endpoint: str = ""


@dataclass(frozen=True)
class NodeFailure:
    """The reason why the job ends. `node` is the host's name as the user gave it."""

    node: str
    reason: str


class NodeBoard:
    """Reads and writes the files of one launch, for one node or for the batch script."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def post(self, record: NodeRecord) -> None:
        """Replace the file of the node that `record` is about."""
        write_json(self._path(record.index), asdict(record))

    def read(self, index: int) -> NodeRecord | None:
        """Return the file of node `index`; None while that node has not started."""
        try:
            return NodeRecord(**json.loads(self._path(index).read_text()))
        except FileNotFoundError:
            return None

    def claim_failure(self, failure: NodeFailure) -> bool:
        """Record `failure` and return True if it is the job's first; otherwise return False."""
        path = self.directory / FAILURE_FILE
        temporary = path.with_name(f".{FAILURE_FILE}.{failure.node}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(failure)))
        try:
            os.link(temporary, path)  # atomic and exclusive, with its content, so no reader sees half a file
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def failure(self) -> NodeFailure | None:
        """Return the job's first failure; None if nothing has failed."""
        try:
            return NodeFailure(**json.loads((self.directory / FAILURE_FILE).read_text()))
        except FileNotFoundError:
            return None

    def _path(self, index: int) -> Path:
        return self.directory / f"node-{index}.json"


class Watch:
    """Finds nodes whose counter has stopped for `timeout_s`; for nodes not yet started, time counts from creation."""

    def __init__(
        self, board: NodeBoard, indices: list[int], timeout_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self._board, self._timeout_s, self._clock = board, timeout_s, clock
        self._seen: dict[int, tuple[int, float]] = {index: (-1, clock()) for index in indices}

    def lost(self) -> list[tuple[int, NodeRecord | None]]:
        """Return nodes not done and silent for too long, each with its last record (None: it never started)."""
        now, found = self._clock(), []
        for index, (beat, since) in list(self._seen.items()):
            record = self._board.read(index)
            if record is not None and (record.state == "done" or record.beat != beat):
                self._seen[index] = (record.beat, now)
            elif now - since > self._timeout_s:
                found.append((index, record))
        return found
