"""Writes TensorBoard scalars: one event per step, which is in the file when `write` returns."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

# Not tensorboardX's SummaryWriter: it queues events for a thread, and a killed run loses the queue.
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from megarl.common.rundir.rotating_lines import delete_oldest, part_bytes

_FRAME_BYTES = 16  # of a record around its event: the length and two checksums


class TensorBoardSink:
    """Writes `events.out.tfevents.*` into `directory`; one event per step with all its scalars."""

    name = "TensorBoard"

    def __init__(self, directory: Path, limit: int = 0) -> None:
        """`limit`: most bytes of all event files in `directory`, including earlier starts; 0: no limit.

        Beyond it the oldest files are deleted. A file is full once it reaches an eighth of the limit.
        """
        self._directory, self._files, self._limit = directory, 0, limit
        self._bytes = 0  # of the open file, without its first event
        self._writer: EventsWriter | None = self._open()

    def _open(self) -> EventsWriter:
        """Begin a file. Its name has the pid and a number, because several may begin in the same second."""
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._limit:
            self._delete_oldest()
        self._files += 1
        self._bytes = 0
        number = f".{self._files}" if self._files > 1 else ""
        writer = EventsWriter(str(self._directory / "events"), f".{os.getpid()}{number}.megarl")
        writer.flush()
        return writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event with all metrics of the step as scalars, and flush it."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def roll_back(self, step: int) -> None:
        """Write the event that makes viewers discard the values of earlier files after `step`."""
        log = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=step + 1, session_log=log))

    def close(self) -> None:
        """Flush and close the events file."""
        if self._writer is not None:
            self._writer.close()

    def _add(self, event: Event) -> None:
        """Write one event. Raises OSError if the disk fails; the next event then begins a new file.

        Readers ignore everything after an incomplete event.
        """
        writer, self._writer = self._writer or self._open(), None
        writer.write_event(event)
        writer.flush()
        self._bytes += event.ByteSize() + _FRAME_BYTES
        if self._limit and self._bytes >= part_bytes(self._limit):
            writer.close()
        else:
            self._writer = writer

    def _delete_oldest(self) -> None:
        """Make room for one more full file. Each start begins one, even if the last file is small."""
        found = sorted((path.stat().st_mtime_ns, path.name, path) for path in self._directory.glob("*.megarl"))
        delete_oldest([path for *_, path in found], self._limit - part_bytes(self._limit))
