"""The pictures of docs/results.md, from the kept numbers of benchmarks/learning.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from benchmarks.lib.learning_results import RESULTS, LearningRun, Recovery, Results
from megarl.report.page.html import Html, tag
from tools.images.series_panels import Curve, Panel, ends, panels
from tools.images.svg import document, number, text

COLORS = ("first", "second", "third")
BOUNDS = (1, 4, 8)
Series = Callable[[LearningRun], Sequence[float]]


def learning_pictures() -> dict[str, str]:
    """Return the content of each picture for which there are numbers."""
    results = Results.read(RESULTS)
    made = {}
    modes = _curves(results, "additions", [(name, False) for name in ("sync", "one step off", "stream")], _rewards)
    bounded = [(f"async {bound}{words}", bool(words)) for words in ("", " uncorrected") for bound in BOUNDS]
    if modes:
        drawn = _curves(results, "additions", bounded, _rewards)
        made["results_modes.svg"] = panels(
            "Mean reward of each step", "The mean reward of each mode and of each bound of staleness rises.",
            _footer(results, "additions"),
            [_share("by mode", modes), _share("by bound of staleness; dashed: uncorrected", drawn)],
        )  # fmt: skip
        ess, k3 = (_curves(results, "additions", bounded, of) for of in (lambda run: run.ess, lambda run: run.k3_kl))
        (low, _), (_, top) = (ends([value for curve in of for run in curve.runs for value in run]) for of in (ess, k3))
        low = math.floor(low * 50) / 50
        made["results_mismatch.svg"] = panels(
            "The trained policy and the sampling policy", "Effective sample size and KL by bound.",
            _footer(results, "additions"),
            [
                Panel("effective sample size; dashed: uncorrected", ess, low, 1.0, lambda value: f"{value:.3f}"),
                Panel("k3 estimate of the KL, nats per token", k3, 0.0, top, lambda value: f"{value:.3f}"),
            ],
        )  # fmt: skip
    tools = [("with the calculator", False), ("without a tool", False)]
    if agents := _curves(results, "calculator", tools, _rewards):
        calls = _curves(results, "calculator", tools, lambda run: run.tool_calls)
        made["results_agents.svg"] = panels(
            "An agent with and without its tool", "The reward rises only with the calculator.",
            _footer(results, "calculator"),
            [_share("mean reward", agents), Panel("calls of the tool per sample", calls, 0.0, 2.0, "{:.1f}".format)],
        )  # fmt: skip
    if results.recovery is not None:
        made["results_recovery.svg"] = _recovery(results.recovery)
    return made


def _rewards(run: LearningRun) -> Sequence[float]:
    return run.rewards


def _share(title: str, curves: Sequence[Curve]) -> Panel:
    return Panel(title, curves, 0.0, 1.0, lambda value: f"{value:.0%}")


def _curves(results: Results, task: str, names: Sequence[tuple[str, bool]], of: Series) -> list[Curve]:
    """Return the curves for which there are runs; dashed ones have the colors of the others in turn."""
    made = []
    for at, (name, dashed) in enumerate(names):
        runs = [of(run) for run in results.runs if (run.task, run.name) == (task, name)]
        if runs:
            made.append(Curve(name, COLORS[at % len(COLORS)], runs, dashed))
    return made


def _footer(results: Results, task: str) -> str:
    seeds = sorted({run.seed for run in results.runs if run.task == task})
    return f"python -m benchmarks.learning; seeds {', '.join(map(str, seeds))}: mean and range"


# The recovery on one time line: the reward of each step, a mark at the end of each, and a bar for each fault.
LEFT, RIGHT, REWARD, STEPS, ROW = 150, 24, (58, 128), 150, 26


def _recovery(recovery: Recovery) -> str:
    width, faults = 900, STEPS + 40
    below = faults + ROW * len(recovery.faults)
    end = max(recovery.steps[-1], *(each.at_s + each.recovered_s for each in recovery.faults))

    def across(seconds: float) -> float:
        return LEFT + (width - LEFT - RIGHT) * seconds / end

    def up(reward: float) -> float:
        return REWARD[1] - (REWARD[1] - REWARD[0]) * reward

    def steps() -> Iterator[Html]:
        yield text(16, up(0.5) + 4, "mean reward", "strong")
        for share in (0.0, 1.0):
            y = number(up(share))
            yield tag("line", x1=number(LEFT), x2=number(width - RIGHT), y1=y, y2=y, class_="grid")
            yield text(LEFT - 8, up(share) + 4, f"{share:.0%}", "quiet", "end")
        shown = zip(recovery.steps, recovery.rewards, strict=True)
        points = " ".join(f"{number(across(seconds))},{number(up(reward))}" for seconds, reward in shown)
        yield tag("polyline", points=points, class_="line-first", stroke_width="2", stroke_linejoin="round")
        yield text(16, STEPS + 4, "steps", "strong")
        yield text(16, STEPS + 20, "short: repeated", "quiet")
        for times, color, half in ((recovery.redone, "quiet", 4), (recovery.steps, "third", 8)):
            for x in map(number, map(across, times)):
                yield tag("line", x1=x, x2=x, y1=str(STEPS - half), y2=str(STEPS + half), class_=f"line-{color}")

    def bars() -> Iterator[Html]:
        for at, fault in enumerate(recovery.faults):
            y = faults + ROW * at
            start, stop = across(fault.at_s), across(fault.at_s + fault.recovered_s)
            yield text(16, y + 12, fault.name, "strong")
            size = {"x": number(start), "y": str(y), "width": number(max(3.0, stop - start)), "height": "15", "rx": "3"}
            yield tag("rect", class_="fill-second", **size)
            again = f", steps repeated: {fault.redone_steps}" if fault.redone_steps else ""
            words = f"{fault.recovered_s:.0f} s{again}"
            late = stop > width * 0.75
            yield text(start - 8 if late else stop + 8, y + 12, words, "quiet", "end" if late else "start")
        for quarter in range(5):
            seconds = end * quarter / 4
            anchor = "end" if quarter == 4 else "middle"
            yield text(across(seconds), below + 22, f"{seconds:.0f} s", "quiet", anchor)

    names = ", ".join(f"{each.name} {each.recovered_s:.0f} s" for each in recovery.faults)
    command = f"python -m benchmarks.learning --only recovery --rpc-s {recovery.rpc_s:g}"
    return document(
        width, below + 64, "A run under faults", f"Seconds until the run had recovered: {names}.",
        text(16, 28, "A run under faults: its steps, and the time to recover", "title"), *steps(), *bars(),
        text(width - 14, below + 52, command, "quiet", "end"),
    )  # fmt: skip
