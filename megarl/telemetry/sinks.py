"""The outputs for metrics and samples: metrics.jsonl, samples.jsonl, TensorBoard, Weights & Biases, the terminal.

Only one rank writes. A sink never changes a value, and undeclared metrics are refused before any sink gets them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from megarl.common.files import finite
from megarl.common.run_files import ExitRecord, write_exit
from megarl.config.schema import Config
from megarl.telemetry.declarations import REGISTRY
from megarl.telemetry.progress import Progress
from megarl.telemetry.summary import RunSummary


class Sink(Protocol):
    """One output for the reduced metrics of each step."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the reduced metrics of one step by name."""

    def roll_back(self, step: int) -> None:
        """Discard the metrics after `step`, because the run resumes there."""

    def close(self) -> None:
        """Flush and close the output; nothing may be written after it."""


class JsonlSink:
    """Appends one JSON object per line, `step` and `wall_time` (Unix seconds) first, and flushes each line.

    NaN and infinities are written as null.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step as one line."""
        self.write_object({"step": step, "wall_time": round(time.time(), 3), **values})

    def roll_back(self, step: int) -> None:
        """Do nothing: `checkpoint/save/history.py` has already cut the file."""

    def write_object(self, content: Mapping[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(finite(content), allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; every line has already been flushed."""
        self._file.close()


class WandbSink:
    """Logs to Weights & Biases. The locked requirements do not contain the package; the user has to install it."""

    def __init__(self, project: str, config: Config) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError(
                "telemetry.wandb_project: wandb is not installed; pip install wandb, or leave it null"
            ) from None
        self._run = wandb.init(
            project=project,
            name=config.run.name,
            dir=str(config.run_dir),
            config=config.model_dump(mode="json"),
        )
        # An evaluation beside training is logged when it has ended, and belongs to the step at which it began.
        self._run.define_metric("eval/step")
        self._run.define_metric("eval/*", step_metric="eval/step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of one step under that step."""
        self._run.log(dict(values), step=step)

    def roll_back(self, step: int) -> None:
        """Do nothing: a resumed run is a separate run in Weights & Biases."""

    def close(self) -> None:
        """Finish the run in Weights & Biases, which uploads what is left."""
        self._run.finish()


class MetricsWriter:
    """All sinks of a run; `write` is called once per step with the reduced metrics of the step."""

    def __init__(
        self, sinks: list[Sink], samples: JsonlSink | None, progress: Progress, run_dir: Path | None = None
    ) -> None:
        """`run_dir`: where summary and exit record go; None: nowhere."""
        self._run_dir = run_dir
        self._sinks = sinks
        self._samples = samples
        self.progress = progress

    @classmethod
    def open(cls, config: Config, terminal: TextIO) -> MetricsWriter:
        """Open the sinks that the section `telemetry` selects; they append to the files of the run directory."""
        run_dir, telemetry = config.run_dir, config.telemetry
        sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl")]
        if telemetry.tensorboard:
            from megarl.telemetry.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(run_dir / "tensorboard"))
        if telemetry.wandb_project is not None:
            sinks.append(WandbSink(telemetry.wandb_project, config))
        samples = JsonlSink(run_dir / "samples.jsonl") if telemetry.samples_per_step else None
        return cls(sinks, samples, Progress(terminal, config.run.steps), run_dir)

    @classmethod
    def silent(cls) -> MetricsWriter:
        """Return a writer for the ranks that do not write; it only checks the names of metrics."""
        return cls([], None, Progress(open(os.devnull, "w", encoding="utf-8"), 0))

    def write(self, step: int, values: Mapping[str, float], *, terminal: bool = True) -> None:
        """Write to every sink, and with `terminal` print a line of the step table.

        Raises UndeclaredMetricError for an undeclared name, before anything is written.
        """
        for name in values:
            REGISTRY.lookup(name)
        for sink in self._sinks:
            sink.write(step, values)
        if terminal:
            self.progress.step(step, values)

    def roll_back(self, step: int) -> None:
        """Discard the metrics after `step` in every sink, because the run resumes there."""
        for sink in self._sinks:
            sink.roll_back(step)

    def sample(self, step: int, content: Mapping[str, Any]) -> None:
        """Append one sample to samples.jsonl (`megarl.queue.sample_lines`)."""
        if self._samples is not None:
            self._samples.write_object({"step": step, **content})

    def write_summary(self, summary: RunSummary, status: str) -> None:
        """Write RUN_DIR/summary.json."""
        if self._run_dir is not None:
            summary.write(self._run_dir / "summary.json", status)

    def write_exit(self, record: ExitRecord) -> None:
        """Write RUN_DIR/exit.json."""
        if self._run_dir is not None:
            write_exit(self._run_dir, record)

    def close(self) -> None:
        """Close every sink and remove the live line."""
        self.progress.close()
        for sink in self._sinks:
            sink.close()
        if self._samples is not None:
            self._samples.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
