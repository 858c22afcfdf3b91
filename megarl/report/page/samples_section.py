"""The page's sections about trajectories: lag and length histograms, the slowest ones, samples to read. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from megarl.report.page import html
from megarl.report.page.html import BarPart, Html, histogram, legend, stacked, tag
from megarl.report.page.sections import chip
from megarl.report.reading.metrics_file import RunMetrics
from megarl.report.reading.run_directory import ReportedRun
from megarl.report.reading.run_events import CAUSES, SlowTrajectory
from megarl.report.reading.samples_file import Sample, shortened

PEEK = 160  # characters of a folded response
UNFOLDED = 6  # samples of each run
_LAGS = "rollout/version_lag_tokens/"
_CAUSE_COLORS = dict(zip(CAUSES, ("wait1", "load2", "work1", "load4", "load3", "load5"), strict=True))


def lag_tokens(metrics: RunMetrics) -> dict[int, float]:
    """Return the number of tokens by version lag, in updates."""
    return {int(name[len(_LAGS) :]): metrics.sum(name) for name in metrics.family(_LAGS)}


def lag_histogram(runs: Sequence[ReportedRun]) -> Html:
    """Return the shares of all sampled tokens by the age of their weights."""
    lags = [lag_tokens(run.metrics) for run in runs]
    if not any(lags):
        return tag("p", "These runs have recorded no tokens by version lag (rollout/version_lag_tokens/*).",
                   class_="quiet")  # fmt: skip
    every = range(min(min(each) for each in lags if each), max(max(each) for each in lags if each) + 1)
    if len(every) == 1:
        return tag("p", f"All tokens were sampled with weights {every[0]} updates old.", class_="quiet")
    shares = [[each.get(lag, 0.0) / (sum(each.values()) or 1.0) for lag in every] for each in lags]
    return histogram([str(lag) for lag in every], shares, [run.name for run in runs], "updates behind")


def length_histogram(runs: Sequence[ReportedRun]) -> Html:
    """Return the distribution of response lengths over the samples that were read."""
    lengths = [run.samples.lengths for run in runs]
    if not any(lengths):
        return tag("p", "These runs have written no samples (telemetry.samples_per_step: 0).", class_="quiet")
    edges = length_edges(max(max(each) for each in lengths if each))
    shares = [(np.histogram(each, edges)[0] / max(1, len(each))).tolist() for each in lengths]
    width = edges[1] - edges[0]
    labels = [f"{edge:g}" if width == 1 else f"{edge:g}–{edge + width - 1:g}" for edge in edges[:-1]]
    note = ", ".join(
        f"{len(each):,} samples" + ("" if run.samples.whole else " at equal distances in the file")
        + (f" of {run.name}" if len(runs) > 1 else "")
        for each, run in zip(lengths, runs, strict=True)
    )  # fmt: skip
    names = [run.name for run in runs]
    return tag("div", histogram(labels, shares, names, "tokens"), tag("p", f"From {note}.", class_="note"))


def length_edges(longest: int, most: int = 40) -> list[int]:
    """Return the edges of at most `most` bins of whole tokens, from 0 to above `longest`, with a round width."""
    width = max(1, round_up((longest + 1) / most))
    return list(range(0, longest + width + 1, width))


def round_up(value: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least `value`."""
    power = 10 ** max(0, math.floor(math.log10(max(value, 1.0))))
    return next(int(power * step) for step in (1, 2, 5, 10) if power * step >= value)


def slowest(runs: Sequence[ReportedRun]) -> Html:
    """Return the slowest trajectories of each run, and where their time went."""
    blocks = []
    for index, run in enumerate(runs):
        title = chip(index, run) if len(runs) > 1 else ""
        if not run.events.slow:
            reason = (
                "No slow trajectories were recorded yet." if run.events.recorded
                else "This run has recorded no events (RUN_DIR/events), so the causes of slow trajectories are unknown."
            )  # fmt: skip
            longest = run.metrics.largest("rollout/generate_seconds_max")
            if not math.isnan(longest):
                reason += f" The slowest sample took {html.duration(longest)} to generate."
            blocks.append(tag("div", title, tag("p", reason, class_="quiet")))
            continue
        top = run.events.slow[0].seconds or 1.0
        rows = [_slow_row(trajectory, top) for trajectory in run.events.slow]
        blocks.append(tag("div", title, rows, class_="slow"))
    colors = legend(list(_CAUSE_COLORS.items())) if any(run.events.slow for run in runs) else ""
    return tag("div", tag("div", blocks, class_="side"), colors)


def _slow_row(trajectory: SlowTrajectory, top: float) -> Html:
    where = f"step {trajectory.step}, {trajectory.group}:{trajectory.sample}"
    engine = "" if trajectory.replica is None else f", replica {trajectory.replica}"
    turns = f" in {trajectory.turns} turns" if trajectory.turns > 1 else ""
    what = f"{html.duration(trajectory.seconds)}, {trajectory.tokens:,} tokens{turns}{engine}"
    parts = [
        BarPart(name, seconds, _CAUSE_COLORS[name]) for name, seconds in zip(CAUSES, trajectory.parts, strict=True)
    ]
    whole = sum(trajectory.parts)
    return tag(
        "div", tag("span", where, class_="who"), tag("b", trajectory.cause), tag("span", what, class_="what"),
        stacked(parts, whole, trajectory.seconds / top, "s"), class_="trajectory",
    )  # fmt: skip


def samples(runs: Sequence[ReportedRun]) -> Html:
    """Return readable samples of each run, the newest first."""
    columns = []
    for index, run in enumerate(runs):
        newest = reversed(run.samples.samples)
        shown = [_sample(sample, is_open=not number) for number, sample in enumerate(newest)]
        if not shown:
            shown = [tag("p", "This run has written no samples.", class_="quiet")]
        if more := shown[UNFOLDED:]:
            shown[UNFOLDED:] = [tag("details", tag("summary", f"{len(more)} more"), more, class_="more")]
        columns.append(tag("div", chip(index, run) if len(runs) > 1 else "", shown, class_="samples"))
    return tag("div", columns, class_="side")


def _sample(sample: Sample, *, is_open: bool) -> Html:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.4g}"
    reward = "demonstration" if sample.demonstrated else reward
    end = "failed" if sample.status != "ok" else {"length": "cut"}.get(sample.finish_reason, "")
    head = [
        tag("span", f"step {sample.step}"), tag("b", reward), tag("span", f"{sample.response_tokens:,} tokens"),
        tag("span", end, class_="end") if end else "", tag("span", sample.dataset) if sample.dataset else "",
        tag("span", f"{sample.group_id}:{sample.sample_index}", class_="key"),
        tag("span", " ".join(sample.response[:PEEK].split()), class_="peek"),
    ]  # fmt: skip
    body = [tag("pre", shortened(sample.prompt), class_="prompt"), _response(sample)]
    facts = [("reference", sample.reference), ("failure", sample.failure), ("reward error", sample.reward_error)]
    known = [tag("div", tag("b", name), " ", shortened(value, 1000)) for name, value in facts if value]
    components = [
        tag("span", name, " ", tag("b", html.MISSING if value is None else f"{value:.4g}"))
        for name, value in sample.reward_components.items()
    ]
    versions = sorted({span["version"] for span in sample.versions if "version" in span})
    if versions:
        first, last = versions[0], versions[-1]
        components.append(tag("span", "weights ", tag("b", str(first) if first == last else f"{first} to {last}")))
    return tag("details", tag("summary", head), body, known, tag("div", components, class_="components"), open=is_open)


def _response(sample: Sample) -> Html:
    """Return the response, with text inserted by an environment set apart."""
    if not sample.parts:
        return tag("pre", shortened(sample.response), class_="response")
    most = max(500, 6000 // len(sample.parts))
    pieces = [
        tag("span", shortened(part.get("text", ""), most), class_="inserted" if part.get("by") != "model" else None)
        for part in sample.parts[:60]
    ]
    left = len(sample.parts) - len(pieces)
    return tag("pre", pieces, f"\n[… {left} parts left out …]" if left else "", class_="response")
