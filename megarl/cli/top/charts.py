"""Numbers, sparklines and bars as text for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from megarl.telemetry.metrics.progress import compact, duration

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-:=+*#"
MISSING = "-"


def number(value: float, style: str = "compact") -> str:
    """Format a value by a format specification, `compact` or `time`; `-` for NaN."""
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return str(value)
    if style == "compact":
        return compact(value)
    return duration(value) if style == "time" else format(value, style)


def percent(value: float) -> str:
    """Return a share in percent with three digits, below 0.05% as 0%; `-` for NaN."""
    if not math.isfinite(value):
        return MISSING
    return f"{100 * value:.3g}%" if abs(value) >= 0.0005 else "0%"


def thinned(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values: means of neighboring ones, without NaN."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)]
    parts = ([v for v in values[low:high] if math.isfinite(v)] for low, high in itertools.pairwise(edges))
    # Divide before adding: the sum of large values may overflow.
    return [math.fsum(v / len(part) for v in part) if part else math.nan for part in parts]


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS) -> str:
    """Return a line of at most `width` characters, from the lowest to the highest value; a blank for NaN."""
    shown = thinned(values, width)
    finite = [value for value in shown if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = 1.0 if math.isfinite(high - low) else 0.5  # the difference of the largest floats overflows
    span = high * scale - low * scale
    steps = len(blocks) - 1

    def block(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return blocks[round((value * scale - low * scale) / span * steps) if span else steps // 2]

    return "".join(map(block, shown))


def bar(share: float, width: int, full: str = "█", empty: str = "░") -> str:
    """Return a bar of `width` characters for a share of 0 to 1; empty for NaN."""
    filled = 0 if math.isnan(share) else round(min(1.0, max(0.0, share)) * width)
    return full * filled + empty * (width - filled)
