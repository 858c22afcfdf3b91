"""The generated pages: they are written where they differ, and every query of the dashboard names existing metrics."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.telemetry.sinks.prometheus_names import all_names
from tests.support.checkout import ROOT
from tools.docs import __main__ as command
from tools.docs.grafana import dashboard
from tools.images.drawings import IMAGES, drawings
from tools.images.series_panels import Curve, Panel, ends
from tools.images.series_panels import panels as draw_panels

FUNCTIONS = {"time", "on", "label_values"}


def panels() -> list[dict[str, Any]]:
    return list(json.loads((ROOT / "docs" / "reference" / "grafana.json").read_text())["panels"])


def queries() -> list[tuple[str, str]]:
    """Every query of the file with the legend of its series."""
    return [(each["expr"], each["legendFormat"]) for panel in panels() for each in panel.get("targets", ())]


def named(expression: str) -> set[str]:
    """The metrics that a PromQL expression names: identifiers that are no function, keyword, label or text."""
    without_labels = re.sub(r"\{[^}]*\}", "", expression)
    without_matching = re.sub(r"\b(on|by|ignoring|without)\s*\([^)]*\)", "", without_labels)
    words = set(re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", without_matching))
    return words - FUNCTIONS


def test_pages_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--out", str(tmp_path), "--check"]) == 1
    assert command.main(["--out", str(tmp_path)]) == 0
    assert command.main(["--out", str(tmp_path), "--check"]) == 0
    assert "up to date" in capsys.readouterr().out


def test_every_query_names_existing_metrics_of_the_chosen_runs() -> None:
    known = all_names()
    for expression, _ in queries():
        found = named(expression)
        assert found and found <= known.keys(), expression
        assert expression.count('run=~"$run"') == len(found)
        assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_every_legend_names_labels_that_the_metric_has_and_tells_its_series_apart() -> None:
    known = all_names()
    for expression, legend in queries():
        labels = {label for name in named(expression) for label in known[name].labels}
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) == labels - {"run_dir", "version"} | {"run"}, (
            expression,
            legend,
        )


def test_the_variable_of_runs_asks_for_a_label_of_an_existing_metric() -> None:
    variables = {each["name"]: each for each in json.loads(dashboard())["templating"]["list"]}
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["run"]["query"])
    assert match is not None and match[1] in all_names() and match[2] == "run"
    assert all(each["datasource"]["uid"] == "${datasource}" for panel in panels() for each in panel.get("targets", ()))
    assert variables["datasource"]["query"] == "prometheus"


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    found = panels()
    assert len({panel["id"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken and all(0 <= x < 24 for x, _ in cells), panel["title"]
        taken |= cells
        assert len({target["refId"] for target in panel.get("targets", ())}) == len(panel.get("targets", ()))


def test_the_pictures_are_those_of_their_sources() -> None:
    made = drawings()
    assert {name: (IMAGES / name).read_text() for name in made} == made, "run `python -m tools.images`"


def test_a_single_value_does_not_flatten_a_picture_and_has_a_mark() -> None:
    values = [0.99 + 0.0001 * step for step in range(99)]
    assert ends([*values, 0.4]) == (values[0], values[-1]) and ends([1.0] * 9) == (1.0, 1.0)
    shown = [Panel("ESS", [Curve("async", "first", [run])], 0.9, 1.0, str) for run in (values, [*values, 0.4])]
    assert [draw_panels("", "", "", [panel]).count("<polygon") for panel in shown] == [0, 1]


def test_the_page_for_users_of_other_trainers_names_existing_keys() -> None:
    from megarl.config.loading.load import walk_keys

    keys = set(walk_keys())
    text = (ROOT / "docs" / "coming-from.md").read_text()
    cells = [row.split(" | ")[-1] for row in text.splitlines() if row.startswith("| ")]
    named = {name.split(":")[0].replace("[]", "") for cell in cells for name in re.findall(r"`([a-z_]+\.[^` ]+)", cell)}
    assert len(named) > 60 and named - keys == set()
