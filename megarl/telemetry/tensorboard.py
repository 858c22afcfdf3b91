"""Writes TensorBoard scalars, one event per step, which is in the file when `write` returns."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

# Not tensorboardX's SummaryWriter: it passes events to a thread through a queue, which is lost when a run is killed.
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary


class TensorBoardSink:
    """Writes `events.out.tfevents.*` into `directory`; one event per step with all its scalars."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # The pid is in the name because two runs may start in the same second.
        self._writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.megarl")
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one event with all metrics of the step as scalars, and flush it."""
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def roll_back(self, step: int) -> None:
        """Write the event by which viewers discard the values of earlier files after `step`."""
        log = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=step + 1, session_log=log))

    def close(self) -> None:
        """Flush and close the events file."""
        self._writer.close()

    def _add(self, event: Event) -> None:
        self._writer.write_event(event)
        self._writer.flush()
