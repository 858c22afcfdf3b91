"""Draws a map of processes (`tools/images/system.py`) as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.report.page.html import Html, tag
from tools.images.svg import document, number, text
from tools.images.system import Arrow, Box, Kind, Panel, Port, SystemMap

LINE = 17  # from one line of text to the next
SHIFT = 5  # between the copies of a box
COLOR: Mapping[Kind, str] = {"weights": "second", "data": "first", "calls": "third"}
THICKNESS: Mapping[Kind, str] = {"weights": "4", "data": "2", "calls": "2"}
HEAD, HALF = 9.0, 5.0  # length of an arrow's head, and half of its width


def system_picture(drawn: SystemMap) -> str:
    """Return the drawing."""
    boxes = {box.key: box for box in drawn.boxes}
    return document(
        drawn.width, drawn.height, drawn.title, drawn.description,
        *_legend(drawn),
        *(part for panel in drawn.panels for part in _panel(panel)),
        *(part for arrow in drawn.arrows for part in _arrow(arrow, boxes)),
        *(part for box in drawn.boxes for part in _box(box)),
        *(part for arrow in drawn.arrows for part in _label(arrow)),
    )  # fmt: skip


def _legend(drawn: SystemMap) -> Iterator[Html]:
    x = 16.0
    for kind, words in drawn.legend:
        yield tag(
            "line", x1=number(x), x2=number(x + 30), y1="24", y2="24", class_=f"line-{COLOR[kind]}",
            stroke_width=THICKNESS[kind],
        )  # fmt: skip
        yield text(x + 38, 28, words, "quiet")
        x += 70 + 6 * len(words)


def _panel(panel: Panel) -> Iterator[Html]:
    yield tag(
        "rect", x=number(panel.x), y=number(panel.y), width=number(panel.width), height=number(panel.height), rx="8",
        class_="panel",
    )  # fmt: skip
    yield text(panel.x + 20, panel.y + 25, panel.title, "title")
    yield text(panel.x + panel.width - 20, panel.y + 25, panel.quiet, "quiet", "end")


def _box(box: Box) -> Iterator[Html]:
    for copy in reversed(range(box.copies)):
        yield tag(
            "rect", x=number(box.x + copy * SHIFT), y=number(box.y + copy * SHIFT), width=number(box.width),
            height=number(box.height), rx="16" if box.stored else "5", class_="box",
        )  # fmt: skip
    yield text(box.x + 14, box.y + 25, box.title, "strong")
    for at, line in enumerate(box.lines, start=1):
        if line:
            yield text(box.x + 14, box.y + 25 + at * LINE, line)


def _arrow(arrow: Arrow, boxes: Mapping[str, Box]) -> Iterator[Html]:
    corners = [_place(arrow.start, boxes), *arrow.via, _place(arrow.end, boxes)]
    color = COLOR[arrow.kind]
    path = list(corners)
    ends = [(-1, -2)] + ([(0, 1)] if arrow.both else [])
    for tip, before in ends:
        path[tip] = _towards(corners[tip], corners[before], HEAD)
    points = " ".join(f"{number(x)},{number(y)}" for x, y in path)
    yield tag("polyline", points=points, class_=f"line-{color}", stroke_width=THICKNESS[arrow.kind])
    for tip, _ in ends:
        yield tag("polygon", points=_head(corners[tip], path[tip]), class_=f"fill-{color}")


def _label(arrow: Arrow) -> Iterator[Html]:
    for at, line in enumerate(arrow.label):
        yield text(arrow.at[0], arrow.at[1] + at * LINE, line, f"fill-{COLOR[arrow.kind]}", arrow.anchor)


def _place(port: Port, boxes: Mapping[str, Box]) -> tuple[float, float]:
    box = boxes[port.box]
    more = (box.copies - 1) * SHIFT  # arrows meet the outermost copy
    if port.side in ("left", "right"):
        return box.x + (box.width + more if port.side == "right" else 0), box.y + port.share * box.height
    return box.x + port.share * box.width, box.y + (box.height + more if port.side == "bottom" else 0)


def _towards(start: tuple[float, float], to: tuple[float, float], length: float) -> tuple[float, float]:
    (x, y), (across, down) = start, (to[0] - start[0], to[1] - start[1])
    whole = (across**2 + down**2) ** 0.5
    return x + across / whole * length, y + down / whole * length


def _head(tip: tuple[float, float], base: tuple[float, float]) -> str:
    along = ((tip[0] - base[0]) / HEAD, (tip[1] - base[1]) / HEAD)
    wings = [(base[0] + side * HALF * along[1], base[1] - side * HALF * along[0]) for side in (-1, 1)]
    return " ".join(f"{number(x)},{number(y)}" for x, y in (tip, *wings))
