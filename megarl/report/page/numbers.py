"""Numbers as the page writes them. Pure."""

from __future__ import annotations

import math
from datetime import UTC, datetime

MISSING = "–"


def share(value: float, digits: int = 0) -> str:
    """Return a share as a percentage."""
    return MISSING if not math.isfinite(value) else f"{value:.{digits}%}"


def amount(value: float) -> str:
    """Return a number with three digits, in thousands, millions or billions if it is large."""
    if not math.isfinite(value):
        return MISSING
    for size, letter, least in ((1e9, "G", 1e9), (1e6, "M", 1e6), (1e3, "k", 1e4)):
        if abs(value) >= least:
            return f"{value / size:.3g}{letter}"
    return f"{value:,.0f}" if abs(value) >= 100 or float(value).is_integer() else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return a time span in the two largest units that it needs."""
    if not math.isfinite(seconds):
        return MISSING
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def moment(unix: float) -> str:
    """Return a Unix time in seconds as a date and time in UTC."""
    if not math.isfinite(unix):
        return MISSING
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def interval(low: float, high: float, value: float) -> str:
    """Return a share with the ends of its interval."""
    if not math.isfinite(value):
        return MISSING
    if not (math.isfinite(low) and math.isfinite(high)):
        return share(value, 1)
    return f"{share(value, 1)} ({low:.1%} to {high:.1%})"
