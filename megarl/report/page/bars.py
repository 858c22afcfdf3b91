"""Bars in HTML and CSS: histograms of several runs, and stacked bars. Pure.

They need no script, keep their font size in a narrow window, and show the number of each bar on hover.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.report.page.html import Html, tag

LABELS = 12  # below a histogram at most


@dataclass(frozen=True)
class BarPart:
    """A part of a stacked bar. `color`: a class of the style sheet."""

    name: str
    value: float
    color: str


def histogram(labels: Sequence[str], shares: Sequence[Sequence[float]], names: Sequence[str], unit: str) -> Html:
    """Return a histogram: for each label one bar per run, the share of the run's total.

    Shapes: `labels` [bins], `shares` [runs][bins] in 0 to 1, `names` [runs]. `unit`: of the labels.
    """
    top = max((value for run in shares for value in run), default=0.0) or 1.0
    every = max(1, -(-len(labels) // LABELS))
    columns = []
    for number, label in enumerate(labels):
        bars = [
            tag(
                "i", class_=f"run{index}", style=f"height:{100 * run[number] / top:.2f}%",
                title=f"{names[index]}: {run[number]:.2%} at {label} {unit}",
            )
            for index, run in enumerate(shares)
        ]  # fmt: skip
        mark = label if number % every == 0 else ""
        columns.append(tag("div", tag("div", bars, class_="bin"), tag("span", mark), class_="column"))
    axis = tag("div", tag("span", f"{top:.2g}" if top < 0.001 else f"{top:.1%}"), tag("span", "0"), class_="height")
    return tag(
        "div", axis, tag("div", columns, class_="columns"), tag("div", unit, class_="unit"), class_="histogram",
    )  # fmt: skip


def stacked(parts: Sequence[BarPart], whole: float, scale: float = 1.0, unit: str = "") -> Html:
    """Return a stacked bar of parts with their names and shares. `scale`: the length of the bar, 0 to 1."""
    pieces = []
    for part in parts:
        if part.value <= 0 or whole <= 0:
            continue
        portion = part.value / whole
        amount = f"{part.value:,.3g} {unit}, {portion:.1%}" if unit else f"{portion:.1%}"
        inside = f"{part.name} {portion:.0%}" if portion * scale >= 0.12 else ""
        pieces.append(
            tag("i", inside, class_=part.color, style=f"width:{100 * portion:.3f}%", title=f"{part.name}: {amount}")
        )
    return tag("div", pieces, class_="stacked", style=f"width:{100 * scale:.2f}%")


def legend(parts: Sequence[tuple[str, str]]) -> Html:
    """Return the names of colors: (name, class) pairs."""
    return tag("div", [tag("span", tag("i", class_=color), name) for name, color in parts], class_="legend")
