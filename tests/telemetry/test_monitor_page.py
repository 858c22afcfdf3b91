"""The table of the monitor's page is that of the code: every rule with its threshold, patience and default action."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from megarl.config.schema.monitor import RULES, MonitorConfig
from megarl.run.loop.monitor import rules_of

PAGE = (Path(__file__).parents[2] / "docs" / "observability" / "monitor.md").read_text(encoding="utf-8")


class ShownRule(NamedTuple):
    """A row of the page."""

    side: str
    threshold: float
    patience: int
    action: str


def shown_rules(page: str) -> dict[str, ShownRule]:
    """The rows of the table of alarms, by rule; a row that cannot be read is an error."""
    rows = {}
    for line in re.findall(r"^\| <a id=.*$", page, re.MULTILINE):
        name, _, threshold, patience, action = [cell.strip() for cell in line.strip("|").split(" | ")[:5]]
        anchor, shown = re.fullmatch(r'<a id="(\w+)"></a>`(\w+)`', name).groups()  # type: ignore[union-attr]
        assert anchor == shown
        side, number, percent = re.match(r"(above|below) ([\d.]+)(%?)", threshold).groups()  # type: ignore[union-attr]
        rows[shown] = ShownRule(side, float(number) / (100 if percent else 1), int(patience), action)
    return rows


def test_the_table_is_that_of_the_code() -> None:
    rules = {each.name: ShownRule(each.side, each.threshold, each.patience, each.action)
             for each in rules_of(MonitorConfig())}  # fmt: skip
    assert shown_rules(PAGE) == rules and rules.keys() == RULES.keys()


def test_the_thresholds_alongside_the_worst_values_of_sound_runs_are_those_of_the_table() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+)(?: in \d+ steps)? \|$", PAGE, re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        name: rule.threshold for name, rule in shown_rules(PAGE).items()
    }
