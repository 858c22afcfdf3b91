"""Plots as data, numbers as text, bars, and names of runs."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.checks.layout import layout_problems
from megarl.report.page import html
from megarl.report.page.figures import evaluation_figures, figures_of, not_drawn, rounded, run_axis
from megarl.report.page.html import BarPart, histogram, stacked
from megarl.report.page.sections import _first_and_last
from megarl.report.reading.run_directory import differences, distinct_names, flat, layout_of
from megarl.telemetry.metrics.declarations import REGISTRY
from tests.support.telemetry.html_reader import HtmlReader
from tests.support.telemetry.reported_runs import CONFIG, evaluation_line, metrics_of, step_line
from tests.support.trainer.configs import config


def test_runs_share_a_plot_and_those_without_values_have_no_line() -> None:
    first = metrics_of([evaluation_line(0, 0.5), *(step_line(step) for step in range(1, 31))])
    second = metrics_of([step_line(step, policy__entropy=None) for step in range(1, 11)])
    found = [*figures_of("learning", [first, second]), *figures_of("update", [first, second])]
    figures = {figure.key: figure for figure in found}
    assert [line.run for line in figures["reward"].lines] == [0, 1]
    assert [line.run for line in figures["entropy"].lines] == [0]
    (evaluation,) = evaluation_figures([first, second])
    assert [(line.run, line.label, line.dots) for line in evaluation.lines] == [
        (0, "greedy", True),
        (0, "sampled", True),
    ]
    content = figures["reward"].as_json()["lines"][0]
    assert len(content["y"]) == len(content["low"]) == len(run_axis(first)["step"]) == 30


def test_what_the_plots_leave_out_is_named() -> None:
    sets = [evaluation_line(0, 0.5, f"set-{number}") for number in range(6)]
    lines = [step_line(step, **{f"reward__component__c{number:02d}": 1.0 for number in range(30)}) for step in (1, 2)]
    crowded, plain = metrics_of([*sets, *lines]), metrics_of([step_line(1)])
    shown = [figure.title for figure in evaluation_figures([crowded, plain])]
    (components,) = (each for each in figures_of("learning", [crowded, plain]) if each.key == "components")
    names, nothing = not_drawn([crowded, plain])
    assert nothing == "" and len(shown) == 4
    sets_text, components_text = names.split("; ")
    assert sets_text == "evaluation sets set-4, set-5" and not any(each in str(shown) for each in ("set-4", "set-5"))
    listed = components_text.removeprefix("reward components ").removesuffix(" and 14 more").split(", ")
    drawn = [line.label for line in components.lines if line.run == 0]
    assert len(listed) == 12 and len(drawn) == 6 and not set(listed) & set(drawn), "32 components: 6 + 12 + 14"


def entropy_line(steps: int, buckets: int) -> dict:
    metrics = metrics_of([step_line(step) for step in range(1, steps + 1)], buckets)
    (entropy,) = (figure for figure in figures_of("update", [metrics]) if figure.key == "entropy")
    return entropy.as_json()["lines"][0]


@pytest.mark.parametrize(
    ("values", "unit", "shown"),
    [
        ({"greedy": 0.5, "graded": 0.0}, "share", "50.0%"),
        ({"greedy": 0.5, "graded": 1.0}, "", "0.5"),
        ({"greedy": 1.57, "greedy_low": 1.48, "greedy_high": 1.66}, "", "1.57 (1.48 to 1.66)"),
    ],
)
def test_graded_scores_are_no_percentages(values: dict[str, float], unit: str, shown: str) -> None:
    metrics = metrics_of([{"eval/step": 3.0} | {f"eval/set/{name}": value for name, value in values.items()}])
    (figure,) = evaluation_figures([metrics])
    assert figure.unit == unit and ("accuracy" in figure.note) == (unit == "share")
    assert _first_and_last(metrics, "set", "greedy") == shown


def test_shares_of_right_groups_are_drawn_for_verdicts_only() -> None:
    lines = [step_line(step) for step in (1, 2)]
    graded = [lines[0], lines[1] | {"reward/accuracy": None}]
    for rewards, labels in ((lines, ["filtered", "all right", "all wrong"]), (graded, ["filtered"])):
        (signal,) = (figure for figure in figures_of("learning", [metrics_of(rewards)]) if figure.key == "signal")
        assert [line.label for line in signal.lines] == labels


def test_the_speed_of_a_single_engine_is_drawn_once() -> None:
    several = [step_line(step) for step in (1, 2)]
    single = [
        {name: value for name, value in line.items() if not re.search("per_second/[1-9]", name)} for line in several
    ]
    drawn = [{figure.key for figure in figures_of("speed", [metrics_of(lines)])} for lines in (several, single)]
    assert drawn[0] - drawn[1] == {"replicas"}


def test_what_an_update_is_judged_by_is_drawn() -> None:
    figures = figures_of("update", [metrics_of([step_line(1)])])
    assert [figure.key for figure in figures] == ["loss", "entropy", "kl", "clip", "ess", "mismatch", "grad", "lr"]
    assert not any(figure.is_zero for figure in figures)
    zero = figures_of("update", [metrics_of([step_line(step, policy__clip_fraction=0.0) for step in (1, 2)])])
    assert [figure.key for figure in zero if figure.is_zero] == ["clip"]


def test_a_band_of_no_width_is_left_out() -> None:
    assert "low" not in entropy_line(2, 800)
    line = entropy_line(8, 2)
    assert line["low"][0] < line["y"][0] < line["high"][0]


def test_every_series_that_is_read_is_declared() -> None:
    from megarl.report.reading.metrics_file import FAMILIES, SERIES

    for name in SERIES:
        if name not in ("step", "wall_time"):
            REGISTRY.lookup(name)
    for prefix in FAMILIES:
        REGISTRY.lookup(f"{prefix}7")


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_rounding_keeps_four_digits_and_drops_what_is_no_number(values: list[float]) -> None:
    for value, short in zip(values, rounded(values), strict=True):
        if short is not None and abs(value) < 1e308:
            assert short == pytest.approx(value, rel=5.1e-4)
        else:
            assert short is None or abs(value) >= 1e308
            assert short is not None or not abs(value) < 1e308


def test_numbers_read_well() -> None:
    texts = [html.amount(x) for x in (0.0, 0.1234, 7.0, 940.4, 9999.0, 12_345.0, 3.2e6, 5e9, math.nan)]
    assert texts == ["0", "0.123", "7", "940", "9,999", "12.3k", "3.2M", "5G", "–"]
    spans = [html.duration(x) for x in (0.25, 59.0, 61.0, 7320.0, 200_000.0, math.nan)]
    assert spans == ["0.25 s", "59 s", "1 min 1 s", "2 h 2 min", "2 d 7 h", "–"]
    assert html.interval(0.2, 0.3, 0.25) == "25.0% (20.0% to 30.0%)"
    assert html.moment(0.0) == "1970-01-01 00:00:00 UTC" and html.moment(math.nan) == "–"


def test_bars_have_the_heights_of_their_shares() -> None:
    reader = HtmlReader(histogram(["1", "2"], [[0.25, 0.75], [0.0, 1.0]], ["a", "<b>"], "tokens"))
    heights = [each["style"] for name, each in reader.elements if name == "i"]
    assert heights == ["height:25.00%", "height:0.00%", "height:75.00%", "height:100.00%"]
    assert any(each.get("title") == "<b>: 100.00% at 2 tokens" for _, each in reader.elements)
    reader = HtmlReader(
        stacked([BarPart("decode", 3.0, "x"), BarPart("none", 0.0, "y"), BarPart("tool", 1.0, "z")], 4.0, 0.5, "s")
    )
    assert [each["style"] for _, each in reader.elements] == ["width:50.00%", "width:75.000%", "width:25.000%"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("ab"), st.sampled_from("ab")), min_size=1, max_size=5))
def test_different_directories_have_different_names(ends: list[tuple[str, ...]]) -> None:
    paths = [Path("/absent", *end) for end in ends]
    names = distinct_names(paths)
    assert len(set(names)) == len(set(paths)) and all(str(p).endswith(n) for p, n in zip(paths, names, strict=True))


def test_only_what_differs_of_configs_is_shown() -> None:
    first, second = dict(flat(CONFIG)), dict(flat({**CONFIG, "trainer": {"gpus": 16}, "new": {"list": [1, 2]}}))
    assert differences([first, second]) == {
        "trainer.gpus": ["8", "16"], "trainer.parallel.tensor": ["2", ""], "trainer.parallel.pipeline": ["1", ""],
        "new.list": ["", "[1, 2]"],
    }  # fmt: skip
    assert differences([first, first]) == {}


def test_the_layout_is_that_of_the_config() -> None:
    layout = layout_of(CONFIG)
    assert layout is not None and (layout.trainer_gpus, layout.trainer_unit, layout.replicas) == (8, 2, 4)
    assert layout_of({}) is None and layout_of({"trainer": {"gpus": "many"}, "rollout": {}}) is None
    assert np.isfinite(layout.replica_gpus) and not layout.synchronous and not layout.shared
    shared = layout_of(CONFIG | {"rollout": {**CONFIG["rollout"], "share_gpus": True}})
    assert shared is not None and shared.shared


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("expert", [1, 2, 8])
@pytest.mark.parametrize("expert_tensor", [None, 1, 2])
def test_the_trainer_grows_by_what_the_checks_of_the_layout_accept(
    tensor: int, pipeline: int, expert: int, expert_tensor: int | None
) -> None:
    parallel = {"tensor": tensor, "pipeline": pipeline, "expert": expert, "expert_tensor": expert_tensor}
    layout = layout_of(CONFIG | {"trainer": {"gpus": 64, "parallel": parallel}})
    assert layout is not None

    def accepted(gpus: int) -> bool:
        made = config("m", trainer={"gpus": gpus, "parallel": parallel})
        return not any("multiple" in problem for problem in layout_problems(made.trainer))

    assert [gpus for gpus in range(1, 65) if accepted(gpus)] == list(
        range(layout.trainer_unit, 65, layout.trainer_unit)
    )
