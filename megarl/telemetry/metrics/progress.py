"""The progress output of a run: one aligned line per step, and on a terminal a live line below it."""

import math
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterable, Mapping
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
        """Return the value of this column, right-aligned; `-` if it is missing, stars if it does not fit."""
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
WINDOW = 20  # steps over which rollout speed is averaged: tokens and seconds of one step are of different responses
ROLLOUT_SPEED = "perf/rollout_tokens_per_second"
KL_OLD = Column("kl old", "policy/approx_kl", 7, ".1e")
KL_REFERENCE = Column("kl ref", "policy/kl_ref", 7, ".1e")
# In a run of 99,999 steps a line has 100 characters.
COLUMNS = (
    Column("reward", "reward/mean", 7),
    Column("acc", ACCURACY, 5),
    Column("err", "reward/errors", 3, "compact"),
    Column("loss", "policy/loss", 7, ".4f"),
    KL_OLD,
    Column("entropy", "policy/entropy", 7),
    Column("gnorm", "policy/grad_norm", 5, "compact"),
    Column("length", "rollout/response_length_mean", 6, "compact"),
    Column("gen t/s", ROLLOUT_SPEED, 7, "compact"),
    Column("trn t/s", "perf/trainer_tokens_per_second", 7, "compact"),
    Column("lag", "rollout/version_lag_max", 3, ".0f"),
    Column("s/step", "time/step", 6, ".1f"),
)
LIVE = ("reward/mean", ACCURACY, ROLLOUT_SPEED, "perf/trainer_tokens_per_second")


def are_graded(steps: Iterable[Mapping[str, float | None]]) -> bool:
    """Return whether any of these steps has rewards besides 0 and 1, and so no accuracy."""
    return any(values.get("reward/mean") is not None and values.get(ACCURACY) is None for values in steps)


def rollout_speed(steps: Iterable[Mapping[str, float | None]]) -> float:
    """Return the response tokens per second of all engines over steps, weighted by engine seconds; NaN without any."""
    pairs = [(values.get(ROLLOUT_SPEED), values.get("rollout/engine_seconds")) for values in steps]
    known = [(speed, seconds) for speed, seconds in pairs if speed is not None and seconds is not None]
    if total := sum(seconds for _, seconds in known):
        return sum(speed * seconds for speed, seconds in known) / total
    return next((speed for speed, _ in reversed(pairs) if speed is not None), math.nan)


class Progress:
    """Prints the progress of a run of `steps` steps to `stream`, with a live line if that is a terminal.

    `reference`: show the KL to the reference policy instead of the KL to the old policy. Rollout speed is over the
    newest `WINDOW` steps. Accuracy disappears with the first step of graded rewards. Nothing else may write to
    `stream` between two calls. Thread-safe.
    """

    def __init__(self, stream: TextIO, steps: int, *, reference: bool = False) -> None:
        self._stream = stream
        self._columns = tuple(KL_REFERENCE if reference and each is KL_OLD else each for each in COLUMNS)
        self._steps = steps
        self._recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._printed = 0
        self._live = False
        self._lock = threading.Lock()
        self._newest = ""  # the last step, as the live line shows it
        self._tty = stream.isatty() and os.environ.get("TERM") != "dumb"

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Print one line of the table; the header is repeated every HEADER_EVERY lines."""
        width = len(str(self._steps))
        self._recent.append(values)
        if math.isfinite(speed := rollout_speed(self._recent)):
            values = {**values, ROLLOUT_SPEED: speed}
        if are_graded([values]) and any(column.metric == ACCURACY for column in self._columns):
            self._columns = tuple(column for column in self._columns if column.metric != ACCURACY)
            self._printed = 0
        if self._printed % HEADER_EVERY == 0:
            titles = " ".join(column.title.rjust(column.width) for column in self._columns)
            self._line(f"{'step'.rjust(2 * width + 1)} {titles} {'eta':>6}")
        self._printed += 1
        cells = " ".join(column.cell(values) for column in self._columns)
        eta = values.get("time/eta")
        left = "-" if eta is None else duration(eta)
        live = [column for column in self._columns if column.metric in LIVE]
        shown = [f"{column.title} {column.cell(values).strip()}" for column in live]
        self._newest = "  |  " + "  ".join([*shown, f"eta {left}"])
        done = f"{step:>{width}}/{self._steps}"
        self._line(f"{done:>4} {cells} {left:>6}")

    def message(self, text: str) -> None:
        """Print a separate line, for example of an evaluation or a restart."""
        self._line(text)

    def status(self, text: str) -> None:
        """Replace the live line, on a terminal only: the current activity and a summary of the last step."""
        if self._tty:
            # A longer line would wrap and could not be replaced.
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
