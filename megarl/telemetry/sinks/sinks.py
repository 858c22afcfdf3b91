"""The outputs for metrics and samples: metrics.jsonl, samples.jsonl, TensorBoard, W&B, MLflow, Prometheus, terminal.

Only one rank writes, from a thread (`writer_thread.py`). A sink never changes a value, and undeclared metrics are
refused before any sink gets them.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from megarl.common.clocks import RateLimit
from megarl.common.files import finite, write_json
from megarl.common.rundir import rotating_lines
from megarl.common.rundir.run_files import ExitRecord, write_exit
from megarl.common.values import GIB
from megarl.config.schema import Config
from megarl.config.schema.job import TimeoutsConfig
from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.metrics.progress import Progress
from megarl.telemetry.metrics.summary import RunSummary
from megarl.telemetry.sinks.remote_sink import RemoteSink, own_id
from megarl.telemetry.sinks.writer_thread import WriterHungError, WriterThread

logger = logging.getLogger(__name__)

WAITING_BYTES = 64 << 20  # of lines kept in memory while the disk fails; later lines are lost, and reported
LINE_BYTES = 16 << 20  # more than the longest line
WANDB_FILE = "wandb.json"
COMPLAIN_S = 60.0  # between two warnings to the user; the log has all of them


class Sink(Protocol):
    """One output for the reduced metrics of each step. `name`: its name in messages."""

    name: str

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the reduced metrics of one step by name."""

    def roll_back(self, step: int) -> None:
        """Discard the metrics after `step`, because the run resumes there."""

    def close(self) -> None:
        """Flush and close the output; nothing may be written afterwards."""


class JsonlSink:
    """Appends one JSON object per line, `step` and `wall_time` (Unix seconds) first, and writes each line at once.

    NaN and infinities are written as null. If the disk fails, lines wait in memory and are written before the next one.
    With a limit the file is kept in parts, and the oldest lines are deleted (`megarl.common.rundir.rotating_lines`).
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        """`limit`: bytes of all parts, which one line may exceed; 0: one file that keeps all lines."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.name, self._limit = path, str(path), limit
        self._file: FileIO | None = path.open("ab", buffering=0)
        _remove_cut_line(path)
        self._waiting = bytearray()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step as one line."""
        self.write_object({"step": step, "wall_time": round(time.time(), 3), **values})

    def roll_back(self, step: int) -> None:
        """Remove a partial line that `checkpoint/save/history.py` has left.

        It cuts at a byte position, which is inside a line if the file ended before it at an earlier resume.
        """
        _remove_cut_line(self.path)

    def write_object(self, content: Mapping[str, Any]) -> None:
        """Append one line."""
        line = json.dumps(finite(content), allow_nan=False, ensure_ascii=False) + "\n"
        if len(self._waiting) > WAITING_BYTES:
            raise OSError(
                errno.ENOSPC, f"{len(self._waiting) >> 20} MiB are already waiting; this line is lost", str(self.path)
            )
        self._waiting += line.encode()
        self.write_waiting()

    def write_waiting(self) -> None:
        """Write the waiting lines. Raises OSError if the disk fails; then they keep waiting."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        while self._waiting:
            written = self._file.write(self._waiting)
            del self._waiting[:written]
        if self._limit and self.path.stat().st_size >= rotating_lines.part_bytes(self._limit):
            self._file.close()
            self._file = None  # if rotation fails, the next line opens the file
            rotating_lines.rotate(self.path, self._limit)
            self._file = self.path.open("ab", buffering=0)

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not in the file yet."""
        return len(self._waiting)

    def close(self) -> None:
        """Write the waiting lines, and close the file. Raises OSError if lines are lost."""
        try:
            if self._waiting:
                self.write_waiting()
        finally:
            if self._file is not None:
                self._file.close()


def _remove_cut_line(path: Path) -> None:
    """Cut off an incomplete last line that a killed process or a full disk has left."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = max(0, size - LINE_BYTES)
        file.seek(begin)
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(begin + tail.rfind(b"\n") + 1)


class WandbSink:
    """Logs to Weights & Biases. The locked requirements do not contain the package; the user must install it.

    A resumed run continues the same W&B run: its id is in RUN_DIR/wandb.json. W&B refuses a step below the last one,
    so `steps` is a separate metric, and repeated steps appear twice.
    """

    name = "Weights & Biases"

    def __init__(self, project: str, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "telemetry.wandb_project: wandb is not installed; pip install wandb, or leave it null"
            ) from None
        self._run = wandb.init(
            project=project,
            id=own_id(config.run_dir / WANDB_FILE),
            resume="allow",
            name=config.run.name,
            dir=str(config.run_dir),
            config=config.model_dump(mode="json"),
        )
        self._run.define_metric("*", step_metric="steps")
        # A concurrent evaluation is logged when it ends, but belongs to the step at which it began.
        self._run.define_metric("eval/step")
        self._run.define_metric("eval/*", step_metric="eval/step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step, with the step as `steps`."""
        self._run.log({"steps": step, **values})

    def roll_back(self, step: int) -> None:
        """Do nothing: logged steps stay, and the repeated steps follow them."""

    def close(self) -> None:
        """Finish the run in Weights & Biases, which uploads the rest."""
        self._run.finish()


class MetricsWriter:
    """All sinks of a run; `write` is called once per step with the reduced metrics of the step.

    A thread writes in the order of the calls; `flush` waits for it. A failed sink (a full disk, a lost connection) is
    reported to the user, counted in `failures`, and retried with the next step. It never ends the run. A sink that does
    not return blocks all others: `write`, `sample` and `flush` then raise WriterHungError, which names it.
    """

    def __init__(
        self,
        sinks: list[Sink],
        samples: JsonlSink | None,
        progress: Progress,
        run_dir: Path | None = None,
        timeouts: TimeoutsConfig | None = None,
    ) -> None:
        """`run_dir`: where summary and exit record go; None: nowhere. `timeouts`: the bounds of all waits."""
        self._run_dir = run_dir
        self._sinks = sinks
        self._samples = samples
        self.progress = progress
        self.failures = 0
        self._complaints = RateLimit(COMPLAIN_S)
        self._counting = threading.Lock()
        for sink in sinks:
            if isinstance(sink, RemoteSink):
                sink.report = partial(self._complain, sink.name)
        timeouts = timeouts or TimeoutsConfig()
        self._shutdown_s = timeouts.shutdown_s
        self._closed = False
        self._thread = WriterThread("the metrics writer", timeouts.save_s, "timeouts.save_s")

    @classmethod
    def open(cls, config: Config, terminal: TextIO) -> MetricsWriter:
        """Open the sinks that the section `telemetry` selects; they append to the files of the run directory."""
        run_dir, telemetry = config.run_dir, config.telemetry
        sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", math.ceil(telemetry.keep_gib * GIB))]
        if telemetry.tensorboard:
            from megarl.telemetry.sinks.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(run_dir / "tensorboard", math.ceil(telemetry.keep_gib * GIB)))
        if telemetry.wandb_project is not None:
            sinks.append(WandbSink(telemetry.wandb_project, config))
        if telemetry.mlflow_experiment is not None:
            from megarl.telemetry.sinks.mlflow import MlflowSink

            sinks.append(MlflowSink(config))
        limit = math.ceil(telemetry.keep_gib * GIB)
        samples = JsonlSink(run_dir / "samples.jsonl", limit) if telemetry.samples_per_step else None
        progress = Progress(terminal, config.run.steps, reference=config.needs_reference)
        writer = cls(sinks, samples, progress, run_dir, config.timeouts)
        if telemetry.prometheus_port:
            from megarl.telemetry.sinks.prometheus import PrometheusSink

            endpoint = PrometheusSink(config)
            writer._sinks.append(endpoint)
            writer._submit(endpoint, endpoint.listen)  # a taken port is reported like a failed write
        return writer

    @classmethod
    def silent(cls) -> MetricsWriter:
        """Return a writer for the ranks that do not write; it only checks the names of metrics."""
        return cls([], None, Progress(open(os.devnull, "w", encoding="utf-8"), 0))

    def write(self, step: int, values: Mapping[str, float], *, terminal: bool = True) -> None:
        """Queue the metrics for every sink, and with `terminal` print a line of the step table.

        Raises UndeclaredMetricError for an undeclared name, before anything is written.
        """
        for name in values:
            REGISTRY.lookup(name)
        kept = dict(values)
        for sink in self._sinks:
            self._submit(sink, partial(sink.write, step, kept))
        if terminal:
            self.progress.step(step, values)

    def flush(self) -> None:
        """Wait until all queued writes have succeeded or failed.

        Raises WriterHungError after `timeouts.save_s` without a finished write.
        """
        self._thread.flush()

    def roll_back(self, step: int) -> None:
        """Discard everything after `step` in every sink, because the run resumes there."""
        for sink in (*self._sinks, *([self._samples] if self._samples is not None else [])):
            self._submit(sink, partial(sink.roll_back, step))
        self.flush()

    def sample(self, step: int, make: Callable[[], Mapping[str, Any]]) -> None:
        """Append one sample to the newest part of samples.jsonl (`megarl.queue.sample_lines`).

        `make` returns it; the thread calls it, because decoding takes time.
        """
        if (samples := self._samples) is not None:
            self._submit(samples, lambda: samples.write_object({"step": step, **make()}))

    def waiting(self) -> dict[str, int]:
        """Flush, and return the bytes of each result file that could not be written, by file name."""
        self.flush()
        files = [sink for sink in (*self._sinks, self._samples) if isinstance(sink, JsonlSink)]
        return {sink.path.name: sink.waiting_bytes for sink in files}

    def _submit(self, what: Sink | Path, action: Callable[[], object]) -> None:
        """Queue `action` for the thread, as in `_attempt`."""
        name = str(what) if isinstance(what, Path) else what.name
        self._thread.submit(name, partial(self._attempt, name, action, ours=isinstance(what, JsonlSink)))

    def _attempt(self, name: str, action: Callable[[], object], *, ours: bool) -> None:
        """Run `action` and report its failure. A library's sink may raise anything, `ours` only OSError."""
        try:
            action()
        except Exception as error:
            if ours and not isinstance(error, OSError):
                raise
            self._complain(name, error)

    def _complain(self, name: str, error: Exception) -> None:
        with self._counting:  # services report from other threads
            self.failures += 1
            show = self._complaints.allows()
        logger.warning("%s: %r", name, error)
        if show:
            self.progress.message(
                f"warning: {name} could not be written ({error}); the run continues and tries again; "
                f"{self.failures} failed writes so far"
            )

    def _report_hung(self, error: WriterHungError) -> None:
        with self._counting:
            self.failures += 1
        logger.warning("%s", error)
        self.progress.message(f"warning: {error}; the run ends without them")

    def write_summary(self, summary: RunSummary, status: str) -> None:
        """Queue the current summary for RUN_DIR/summary.json."""
        if self._run_dir is not None:
            path, content = self._run_dir / "summary.json", summary.as_dict(status)
            self._submit(path, partial(write_json, path, content))

    def write_exit(self, record: ExitRecord) -> None:
        """Write RUN_DIR/exit.json after all queued writes. A write that hangs is reported.

        Services get the record's status when they are closed.
        """
        for sink in self._sinks:
            if isinstance(sink, RemoteSink):
                sink.status = record.status
        try:
            self.flush()
        except WriterHungError as error:
            self._report_hung(error)
        if self._run_dir is not None:
            write_exit(self._run_dir, record)

    def close(self) -> None:
        """Close every sink and remove the live line. Raises only errors that are bugs in megarl.

        Bounded by `timeouts.shutdown_s`; a sink that hangs is reported, and ends with the process.
        """
        if self._closed:
            return
        self._closed = True
        sinks = [sink for sink in (*self._sinks, self._samples) if sink is not None]
        last = [
            (sink.name, partial(self._attempt, sink.name, sink.close, ours=isinstance(sink, JsonlSink)))
            for sink in sinks
        ]
        try:
            self._thread.close(last, self._shutdown_s, "timeouts.shutdown_s")
        except WriterHungError as error:
            self._report_hung(error)
        finally:
            self.progress.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
