"""Parts and colors that all drawings of docs/images share.

Colors follow the reader's system (`prefers-color-scheme`). A card with a background of its own covers the whole
drawing, so that it can be read on a page of the other theme too.
"""

from __future__ import annotations

from megarl.report.page.html import Html, tag

# Named colors: (in light, in dark).
COLORS = {
    "card": ("#ffffff", "#1b1f24"),
    "edge": ("#d0d7de", "#444c56"),
    "panel": ("#f3f6f8", "#22272e"),
    "ink": ("#1f2328", "#e6edf3"),
    "quiet": ("#57606a", "#9ea7b3"),
    "first": ("#00796b", "#4db6ac"),
    "second": ("#c2570c", "#f0a35e"),
    "third": ("#3557b7", "#8aa8f5"),
}
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def document(width: int, height: int, title: str, description: str, *parts: Html) -> str:
    """Return a whole SVG file. `title`, `description`: for readers who do not see it."""
    card = tag("rect", x="0.5", y="0.5", width=width - 1, height=height - 1, rx=8, class_="card")
    root = tag(
        "svg",
        tag("title", title), "\n", tag("desc", description), "\n", tag("style", Html(_style())), "\n", card, "\n",
        [Html(part + "\n") for part in parts],
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=width, height=height, role="img",
    )  # fmt: skip
    return f"{root}\n"


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "start", **more: str) -> Html:
    """Return a line of text; `anchor`: start, middle or end of it is at (`x`, `y`)."""
    return tag("text", words, x=number(x), y=number(y), class_=class_ or None, text_anchor=anchor, **more)


def number(value: float) -> str:
    """Return a coordinate with at most two decimals, the same on every machine."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _style() -> str:
    def variables(which: int) -> str:
        return "".join(f"--{name}:{pair[which]};" for name, pair in COLORS.items())

    rules = [
        f":root{{{variables(0)}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{variables(1)}}}}}",
        f"text{{font-family:{_FONT};font-size:13px;fill:var(--ink)}}",
        ".title{font-size:16px;font-weight:600}.strong{font-weight:600}.quiet{fill:var(--quiet);font-size:12px}",
        ".card{fill:var(--card);stroke:var(--edge)}.panel{fill:var(--panel);stroke:var(--edge)}",
        ".box{fill:var(--card);stroke:var(--quiet)}.grid{stroke:var(--edge);fill:none}",
    ]
    for name in ("first", "second", "third", "quiet"):
        rules.append(f".line-{name}{{stroke:var(--{name});fill:none}}.fill-{name}{{fill:var(--{name})}}")
    return "\n".join(["", *rules, ""])
