"""The progress output of a run: one aligned line per step, and on a terminal a live line below it."""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

HEADER_EVERY = 25


@dataclass(frozen=True)
class Column:
    """One column of the step table; `style` is a format specification or `compact`."""

    title: str
    metric: str
    width: int
    style: str = ".3f"

    def cell(self, values: Mapping[str, float]) -> str:
        """Return the value of this column, right-aligned; `-` if the metric is missing, stars if there is no room."""
        value = values.get(self.metric)
        if value is None or not math.isfinite(value):
            return ("-" if value is None else str(value)).rjust(self.width)
        if self.style == "compact":
            text, shorter = compact(value), compact(value, whole=True)
        else:
            text, shorter = format(value, self.style), f"{value:.0e}"
        text = text if len(text) <= self.width else shorter
        return (text if len(text) <= self.width else "*" * self.width).rjust(self.width)


ACCURACY = "reward/accuracy"
KL_OLD = Column("kl old", "policy/approx_kl", 7, ".1e")
KL_REFERENCE = Column("kl ref", "policy/kl_ref", 7, ".1e")
# With those of a run of 99,999 steps a line has 100 characters.
COLUMNS = (
    Column("reward", "reward/mean", 7),
    Column("acc", ACCURACY, 5),
    Column("err", "reward/errors", 3, "compact"),
    Column("loss", "policy/loss", 7, ".4f"),
    KL_OLD,
    Column("entropy", "policy/entropy", 7),
    Column("gnorm", "policy/grad_norm", 5, "compact"),
    Column("length", "rollout/response_length_mean", 6, "compact"),
    Column("gen t/s", "perf/rollout_tokens_per_second", 7, "compact"),
    Column("trn t/s", "perf/trainer_tokens_per_second", 7, "compact"),
    Column("lag", "rollout/version_lag_max", 3, ".0f"),
    Column("s/step", "time/step", 6, ".1f"),
)
LIVE = ("reward/mean", ACCURACY, "perf/rollout_tokens_per_second", "perf/trainer_tokens_per_second")
LIVE_COLUMNS = tuple(column for column in COLUMNS if column.metric in LIVE)


class Progress:
    """Prints the progress of a run of `steps` steps to `stream`, with a live line if that is a terminal.

    `reference`: the run has a reference policy, and the KL to it is shown in place of that to the old policy.

    Nothing else may write to `stream` between two calls. Several threads may call it.
    """

    def __init__(self, stream: TextIO, steps: int, *, reference: bool = False) -> None:
        self._stream = stream
        self._columns = tuple(KL_REFERENCE if reference and each is KL_OLD else each for each in COLUMNS)
        self._steps = steps
        self._printed = 0
        self._live = False
        self._lock = threading.Lock()
        self._newest = ""  # the part of the live line that shows the last step
        self._tty = stream.isatty() and os.environ.get("TERM") != "dumb"

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print one line of the table; the header is repeated every HEADER_EVERY lines."""
        width = len(str(self._steps))
        if self._printed % HEADER_EVERY == 0:
            titles = " ".join(column.title.rjust(column.width) for column in self._columns)
            self._line(f"{'step'.rjust(2 * width + 1)} {titles} {'eta':>6}")
        self._printed += 1
        cells = " ".join(column.cell(values) for column in self._columns)
        eta = values.get("time/eta")
        left = "-" if eta is None else duration(eta)
        shown = [f"{column.title} {column.cell(values).strip()}" for column in LIVE_COLUMNS]
        self._newest = "  |  " + "  ".join([*shown, f"eta {left}"])
        self._line(f"{step:>{width}}/{self._steps} {cells} {left:>6}")

    def message(self, text: str) -> None:
        """Print a separate line, for example of an evaluation or a restart."""
        self._line(text)

    def status(self, text: str) -> None:
        """Replace the live line, on a terminal only: the current activity and a summary of the last step."""
        if self._tty:
            # A line longer than the terminal would wrap and could not be replaced.
            line = (text + self._newest)[: shutil.get_terminal_size().columns - 1]
            with self._lock:
                self._stream.write(f"\r\x1b[2K{line}")
                self._stream.flush()
                self._live = True

    def close(self) -> None:
        """Remove the live line."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._live = False

    def _line(self, text: str) -> None:
        with self._lock:
            self._clear()
            self._stream.write(text + "\n")
            self._stream.flush()


def compact(value: float, *, whole: bool = False) -> str:
    """Return a number with three significant digits and a unit prefix, like 1.23M for 1234567.

    `whole`: without digits behind the point, like 1M; a small number as a power of ten.
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return format(value / limit, ".0f" if whole else ".3g") + unit
    return f"{value:.0e}" if whole else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds as text like 42s, 3m10s, 2h05m or 3d04h."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    if total < 86400:
        return f"{total // 3600}h{total % 3600 // 60:02d}m"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"
