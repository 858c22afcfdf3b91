"""Draws panels of curves with one value per step, of one or several runs each: means as lines, the range as a band."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megarl.report.page.html import Html, tag
from tools.images.svg import document, number, text

WIDTH, HEIGHT = 900, 350
LEFT, TOP, BOTTOM, GAP = 46, 104, 74, 56  # of a panel; GAP to the next one

Place = Callable[[float], float]


@dataclass(frozen=True)
class Curve:
    """A named curve. `runs` [run][step]; `color`: of `svg.COLORS`."""

    name: str
    color: str
    runs: Sequence[Sequence[float]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel; its axis goes from `low` to `high`, values beyond have a mark, and `label` formats a value of it."""

    title: str
    curves: Sequence[Curve]
    low: float
    high: float
    label: Callable[[float], str]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest value, without those far beyond nearly all others, as the report page does.

    Such values would flatten a plot. Raises IndexError if there are none.
    """
    ordered = sorted(values)
    low, middle, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9))
    far = 3 * (high - low) or 9 * abs(middle)
    kept = [value for value in ordered if low - far <= value <= high + far]
    return kept[0], kept[-1]


def panels(title: str, description: str, footer: str, drawn: Sequence[Panel]) -> str:
    """Return the drawing of panels next to each other. A dashed curve has the name of the solid one of its color."""
    width = (WIDTH - LEFT - 20 - (len(drawn) - 1) * GAP) / len(drawn)
    parts = [text(LEFT, 28, title, "title"), text(WIDTH - 14, HEIGHT - 12, footer, "quiet", "end")]
    for at, panel in enumerate(drawn):
        parts += _panel(panel, LEFT + at * (width + GAP), width)
    return document(WIDTH, HEIGHT, title, description, *parts)


def _legend(curves: Sequence[Curve], x: float) -> Iterator[Html]:
    for curve in curves:
        y = number(TOP - 22)
        yield tag("line", x1=number(x), x2=number(x + 22), y1=y, y2=y, **_stroke(curve))
        yield text(x + 28, TOP - 18, curve.name, "quiet")
        x += 44 + 6.4 * len(curve.name)


def _panel(panel: Panel, left: float, width: float) -> Iterator[Html]:
    steps = max((len(run) for curve in panel.curves for run in curve.runs), default=1)

    def across(step: float) -> float:
        return left + width * step / steps

    def up(value: float) -> float:
        share = (min(panel.high, max(panel.low, value)) - panel.low) / (panel.high - panel.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    yield text(left, TOP - 42, panel.title, "strong")
    yield from _legend([curve for curve in panel.curves if not curve.dashed], left)
    for quarter in range(5):
        value = panel.low + (panel.high - panel.low) * quarter / 4
        y = number(up(value))
        yield tag("line", x1=number(across(0)), x2=number(across(steps)), y1=y, y2=y, class_="grid")
        yield text(left - 8, up(value) + 4, panel.label(value), "quiet", "end")
    for quarter in range(5):
        yield text(across(steps * quarter / 4), HEIGHT - BOTTOM + 18, f"{steps * quarter / 4:.0f}", "quiet", "middle")
    yield text(left + width / 2, HEIGHT - BOTTOM + 36, "step", "quiet", "middle")
    for curve in panel.curves:
        yield from _curve(curve, across, up)
        yield from _beyond(curve, panel, across)


def _curve(curve: Curve, across: Place, up: Place) -> Iterator[Html]:
    def points(of: Callable[[Sequence[float]], float]) -> list[str]:
        values = [of(each) for each in zip(*curve.runs, strict=False)]
        return [f"{number(across(step))},{number(up(value))}" for step, value in enumerate(values, start=1)]

    if len(curve.runs) > 1:
        band = [*points(max), *reversed(points(min))]
        yield tag("polygon", points=" ".join(band), class_=f"fill-{curve.color}", opacity="0.12")
    mean = points(lambda values: sum(values) / len(values))
    yield tag("polyline", points=" ".join(mean), stroke_linejoin="round", **_stroke(curve))


def _beyond(curve: Curve, panel: Panel, across: Place) -> Iterator[Html]:
    """Yield a triangle at the edge of the panel for each step with a value beyond it, in the color of the curve."""
    for step, values in enumerate(zip(*curve.runs, strict=False), start=1):
        x = across(step)
        for beyond, tip, inner in (
            (max(values) > panel.high, TOP, 8), (min(values) < panel.low, HEIGHT - BOTTOM, -8),
        ):  # fmt: skip
            if beyond:
                points = f"{number(x)},{tip} {number(x - 5)},{tip + inner} {number(x + 5)},{tip + inner}"
                yield tag("polygon", points=points, class_=f"fill-{curve.color}")


def _stroke(curve: Curve) -> dict[str, str]:
    dashes = {"stroke_dasharray": "5 4"} if curve.dashed else {}
    return {"class_": f"line-{curve.color}", "stroke_width": "2"} | dashes
