"""Lays out the parts on a screen: two columns if there is room, else the most important parts in one."""

from itertools import islice, zip_longest

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from megarl.cli.top import screen_parts
from megarl.cli.top.run_view import RunView
from megarl.cli.top.screen_parts import ScreenPart, Signs

TWO_COLUMNS = 96  # characters from which there are two
GAP = 2
FEWEST_LINES = 2  # of faults and notices each, with their titles
INDENT = 9  # of the text after the time of a fault or notice
MOST_LINES = 4  # of one fault or notice
HINT = "q or Ctrl-C: end"


class Screen:
    """A view as rich renders it, cut to the size of the console."""

    def __init__(self, view: RunView, *, live: bool, height: int | None = None) -> None:
        """`live`: with the keys in the last line. `height`: lines at most, by default those of the console."""
        self._view, self._live, self._height = view, live, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the screen."""
        width = options.max_width
        height = self._height or options.max_height
        signs = Signs.of(options.encoding)
        top = screen_parts.head(self._view, width, signs)[: max(0, height - self._live)]
        room = max(0, height - len(top) - self._live)
        body = _two_columns if width >= TWO_COLUMNS else _one_column
        above = body(self._view, width, room, signs)
        below = _events(self._view, width, room - len(above), signs, console)
        lines = [*top, *[*above, *below][:room], *([Text(HINT, "dim")] if self._live else [])]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
            yield line


def _two_columns(view: RunView, width: int, room: int, signs: Signs) -> list[Text]:
    half = (width - GAP) // 2
    left, right = (
        [line for make in makers for line in _lines(make(view, half, signs), half, signs)]
        for makers in (screen_parts.LEFT, screen_parts.RIGHT)
    )
    pairs = zip_longest(left, right, fillvalue=Text())
    return [_side_by_side(*pair, half) for pair in islice(pairs, max(0, room - 2 * FEWEST_LINES))]


def _one_column(view: RunView, width: int, room: int, signs: Signs) -> list[Text]:
    made = [make(view, width, signs) for make in (*screen_parts.LEFT, *screen_parts.RIGHT)]
    order = ("reward", "throughput", "waiting", "rollout", "evaluation", "update")
    made.sort(key=lambda each: next(place for place, name in enumerate(order) if each.title.startswith(name)))
    lines: list[Text] = []
    for section in made:
        new = _lines(section, width, signs)
        if len(lines) + len(new) + 2 * FEWEST_LINES > room:
            break
        lines += new
    return lines


def _events(view: RunView, width: int, room: int, signs: Signs, console: Console) -> list[Text]:
    """Return faults and notices in `room` lines: each may use the lines that the other does not need."""
    faults, notices = (
        _lines(_wrapped(make(view, width, signs), width, console), width, signs)
        for make in (screen_parts.faults, screen_parts.notices)
    )
    half = max(FEWEST_LINES, room // 2)
    for_faults = min(len(faults), max(half, room - len(notices)))
    return [*faults[:for_faults], *notices[: max(0, room - for_faults)]]


def _wrapped(section: ScreenPart, width: int, console: Console) -> ScreenPart:
    """Wrap the long lines of a section to `MOST_LINES` at most, all but the first indented."""
    lines = []
    for line in section.lines:
        first, *more = line.wrap(console, width - INDENT) if line.cell_len > width else [line]
        lines += [first, *(Text(" " * INDENT).append_text(each) for each in more[: MOST_LINES - 1])]
    return ScreenPart(section.title, lines, section.empty)


def _lines(section: ScreenPart, width: int, signs: Signs) -> list[Text]:
    title = f"{signs.dash * 2} {section.title} "
    return [Text(title + signs.dash * max(0, width - len(title)), "bold dim"), *section.lines]


def _side_by_side(left: Text, right: Text, half: int) -> Text:
    """Return two lines as one; the left one is cut or filled to `half` characters."""
    first = left.copy()
    first.truncate(half, overflow="ellipsis", pad=True)
    return Text.assemble(first, " " * GAP, right)
