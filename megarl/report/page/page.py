"""The page: one HTML file with its style, script and data. It needs no network and must not load anything. Pure."""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from megarl.report.page import html, samples_section, sections
from megarl.report.page.figures import Figure, evaluation_figures, figures_of, run_axis
from megarl.report.page.html import Html, HtmlPart, join, script_json, tag
from megarl.report.reading.run_directory import ReportedRun

SECTIONS = ("learning", "update", "speed", "waiting", "queue", "lengths")  # with plots


@cache
def asset(name: str) -> str:
    """Return a file of this package's `assets`."""
    return (files("megarl.report") / "assets" / name).read_text(encoding="utf-8")


def render(runs: Sequence[ReportedRun], made_at: float) -> str:
    """Return the page about runs. `made_at`: Unix seconds."""
    metrics = [run.metrics for run in runs]
    figures = {name: figures_of(name, metrics) for name in SECTIONS}
    figures["learning"][1:1] = evaluation_figures(metrics)
    data = {
        "names": [run.name for run in runs],
        "axes": [run_axis(run) for run in metrics],
        "alarms": [[index, step, rule] for index, run in enumerate(runs) for step, rule in sections.alarm_steps(run)],
        "figures": [figure.as_json() for each in figures.values() for figure in each if not figure.is_zero],
    }
    return str(
        Html("<!doctype html>\n")
        + tag("html", _head(runs), _body(runs, figures, made_at), _scripts(data), lang="en")
        + Html("\n")
    )


def _head(runs: Sequence[ReportedRun]) -> Html:
    scripts = " ".join(_digest(asset(name)) for name in _SCRIPTS)
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {scripts}"
    )
    return tag(
        "head", tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", "megarl report: " + ", ".join(run.name for run in runs)),
        tag("style", Html(asset("uplot.min.css") + asset("report.css"))),
    )  # fmt: skip


_SCRIPTS = ("uplot.min.js", "report.js")


def _digest(script: str) -> str:
    """Return the policy's source expression that allows only this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _scripts(data: object) -> Html:
    licence = Html("<!-- uPlot:\n" + asset("uplot.LICENSE") + "-->")
    scripts = [tag("script", Html(asset(name))) for name in _SCRIPTS]
    return Html(tag("script", script_json(data), type="application/json", id="data") + licence + "".join(scripts))


def _body(runs: Sequence[ReportedRun], figures: dict[str, list[Figure]], made_at: float) -> Html:
    parts = [
        ("alarms", "Alarms", "", [sections.alarms(runs)]),
        ("advisories", "Advisories", "", [sections.advisories(runs)]),
        ("summary", "Summary", "Means over all steps unless stated otherwise.", [sections.summary(runs)]),
        ("learning", "Reward and evaluation", "", [_plots(figures["learning"])]),
        ("update", "Update", "", [_plots(figures["update"])]),
        ("speed", "Throughput", "", [_plots(figures["speed"]), sections.engines(runs)]),
        ("waiting", "Waiting", "", [
            tag("h3", "The whole time of all steps"), sections.time_budget(runs), _plots(figures["waiting"]),
        ]),
        ("queue", "Version lag and queue", "", [
            tag("h3", "Tokens by version lag"), samples_section.lag_histogram(runs), _plots(figures["queue"]),
        ]),
        ("lengths", "Response length", "", [
            _plots(figures["lengths"]), tag("h3", "Distribution"), samples_section.length_histogram(runs),
        ]),
        ("slowest", "Slowest trajectories", "", [samples_section.slowest(runs)]),
        ("faults", "Faults and their outcome", "", [sections.faults(runs)]),
        ("samples", "Samples", "Half of them at equal distances over the run; the others are recent: new, long or "
         "failed ones, and those with the lowest or highest reward.", [samples_section.samples(runs)]),
        ("config", "Config", "", [sections.configs(runs)]),
    ]  # fmt: skip
    return tag(
        "body", _bar([(key, title) for key, title, *_ in parts]),
        tag("main", sections.header(runs), [_section(*part) for part in parts]),
        tag("footer", f"Made by megarl report at {html.moment(made_at)}. Drag over a plot to zoom in on all of "
            "them, double-click to see everything again. A triangle at the edge of a plot is a value beyond it."),
        tag("noscript", "The plots need JavaScript; tables and bars do not."),
    )  # fmt: skip


def _section(key: str, title: str, note: str, content: Sequence[HtmlPart]) -> Html:
    return tag("section", tag("h2", title), tag("p", note, class_="note") if note else "", *content, id=key)


def _bar(parts: Sequence[tuple[str, str]]) -> Html:
    links = [tag("a", title, href=f"#{key}") for key, title in parts]
    switch = [
        tag("button", "steps", type="button", data_axis="step", aria_pressed="true"),
        tag("button", "hours", type="button", data_axis="hours", aria_pressed="false"),
        tag("button", "light / dark", type="button", id="theme"),
    ]
    return tag("nav", tag("b", "megarl report"), tag("div", links, class_="links"), tag("div", switch))


def _plots(figures: Sequence[Figure]) -> Html:
    boxes = [
        tag(
            "figure", tag("figcaption", tag("b", figure.title), " ", tag("span", figure.unit.replace("share", "%"))),
            tag("div", class_="plot", data_figure=figure.key), tag("p", figure.note, class_="note"),
        )
        for figure in figures
        if not figure.is_zero
    ]  # fmt: skip
    zero = ", ".join(figure.title for figure in figures if figure.is_zero)
    left_out = tag("p", f"0 in all steps: {zero}.", class_="quiet") if zero else ""
    return join([tag("div", boxes, class_="plots"), left_out])
