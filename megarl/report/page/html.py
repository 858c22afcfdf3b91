"""Builds HTML and formats numbers. Every text is escaped unless it is `Html`, which only these functions make. Pure."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

# Bars in HTML and CSS: histograms of several runs, and stacked bars. Pure.
#
# They need no script, keep their font size in a narrow window, and show the number of each bar on hover.

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
    """Return a time span in its two largest units."""
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


def interval(low: float, high: float, value: float, *, graded: bool = False) -> str:
    """Return a share of correct responses, or a `graded` score, with the ends of its interval."""
    if not math.isfinite(value):
        return MISSING
    form = ".3g" if graded else ".1%"
    ends = f" ({low:{form}} to {high:{form}})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{value:{form}}{ends}"


class Html(str):
    """Safe markup."""

    __slots__ = ()


HtmlPart = str | Html | Iterable[str]

_VOID = frozenset(["meta", "input", "br", "hr"])


def escape(text: str) -> Html:
    """Return a text as markup. Control characters, which HTML forbids, become visible symbols."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(_visible(text)))


def _visible(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(_symbol(each) if not each.isprintable() and each not in "\n\t" else each for each in text)


def _symbol(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if character.isspace():
        return character
    # Others are invisible, and some change the direction of the text after them.
    return f"\\u{code:04x}"


def join(parts: Iterable[str]) -> Html:
    """Return texts and markup joined."""
    return Html("".join(escape(part) for part in parts))


def tag(name: str, /, *parts: HtmlPart, **attributes: str | int | bool | None) -> Html:
    """Return an element. `class_` means `class` and `data_x` means `data-x`; None and False omit an attribute."""
    begin = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        begin.append(attribute if value is True else f'{attribute}="{escape(str(value))}"')
    content = "".join(escape(part) if isinstance(part, str) else join(part) for part in parts)
    return Html(f"<{' '.join(begin)}>" + ("" if name in _VOID else f"{content}</{name}>"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]], class_: str = "") -> Html:
    """Return a table whose first column names the rows; wide ones scroll inside their box."""
    body = [tag("tr", tag("th", row[0], scope="row"), [tag("td", cell) for cell in row[1:]]) for row in rows]
    inner = tag("table", tag("thead", tag("tr", [tag("th", each, scope="col") for each in head])), tag("tbody", body))
    return tag("div", inner, class_=f"table {class_}".strip())


def script_json(content: object) -> Html:
    """Return JSON for a script element, in which no text can end the element."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
