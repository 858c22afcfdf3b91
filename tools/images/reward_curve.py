"""Draws docs/images/quickstart_reward.svg: the reward of a quickstart, and its accuracy before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megarl.report.page.html import Html, tag
from tools.images.quickstart_run import Evaluation, QuickstartRun
from tools.images.svg import document, number, text

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 62, 140, 72, 80  # margins around the plot
NORMAL_95 = 1.96

Place = Callable[[float], float]


def reward_curve(run: QuickstartRun) -> str:
    """Return the drawing."""
    steps = len(run.rewards)

    def across(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def up(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    before, after = run.evaluations[0], run.evaluations[-1]
    samples = f"{steps} steps of {run.samples_per_step} samples"
    named = int(steps * 0.45)  # the step below which the curve has its name
    return document(
        WIDTH, HEIGHT, "Reward of the quickstart",
        f"The mean reward rises from {run.rewards[0]:.2f} to {run.rewards[-1]:.2f} in {samples}; accuracy on "
        f"{after.problems} held-out problems rises from {before.greedy[0]:.1%} to {after.greedy[0]:.1%} (greedy) and "
        f"from {before.sampled[0]:.1%} to {after.sampled[0]:.1%} (sampled).",
        text(LEFT, 28, f"{run.command}: share of right answers", "title"),
        text(LEFT, 48, f"GRPO on two-digit additions, a Qwen3 of 0.43 M parameters, {samples}", "quiet"),
        *_axes(steps, across, up),
        *_curve(run, across, up),
        *_evaluated(before, across, up, labelled=False),
        *_evaluated(after, across, up, labelled=True),
        text(across(named), up(run.rewards[named]) + 54, "mean reward of each step's samples", "strong fill-third"),
        text(across(named), up(run.rewards[named]) + 71, "with its 95% interval over prompt groups", "quiet"),
        text(WIDTH - 14, HEIGHT - 12, f"{run.date}, {run.machine}, commit {run.commit}", "quiet", "end"),
    )  # fmt: skip


def _axes(steps: int, across: Place, up: Place) -> Iterator[Html]:
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = number(up(share))
        yield tag("line", x1=number(across(0)), x2=number(across(steps)), y1=y, y2=y, class_="grid")
        yield text(LEFT - 12, up(share) + 4, f"{share:.0%}", "quiet", "end")
    for step in range(0, steps + 1, max(1, steps // 4)):
        yield text(across(step), up(0) + 20, str(step), "quiet", "middle")
    yield text((across(0) + across(steps)) / 2, up(0) + 38, "step", "quiet", "middle")


def _curve(run: QuickstartRun, across: Place, up: Place) -> Iterator[Html]:
    def points(side: int) -> list[str]:
        shares = [
            min(1.0, max(0.0, mean + side * NORMAL_95 * error))
            for mean, error in zip(run.rewards, run.stderrs, strict=True)
        ]
        return [f"{number(across(step))},{number(up(share))}" for step, share in enumerate(shares, start=1)]

    yield tag("polygon", points=" ".join([*points(1), *reversed(points(-1))]), class_="fill-third", opacity="0.18")
    yield tag("polyline", points=" ".join(points(0)), class_="line-third", stroke_width="2.5", stroke_linejoin="round")


def _evaluated(evaluation: Evaluation, across: Place, up: Place, *, labelled: bool) -> Iterator[Html]:
    """Yield both accuracies of an evaluation as dots with their intervals, and their names if `labelled`."""
    x = across(evaluation.step)
    for (value, low, high), name, color in (
        (evaluation.greedy, "greedy", "first"),
        (evaluation.sampled, "sampled", "second"),
    ):
        bar = {"x1": number(x), "x2": number(x), "y1": number(up(low)), "y2": number(up(high))}
        yield tag("line", class_=f"line-{color}", stroke_width="2", **bar)
        yield tag("circle", cx=number(x), cy=number(up(value)), r="5", class_=f"fill-{color}")
        words = f"{value:.1%} {name}" if labelled else f"{value:.1%}"
        yield text(x + 10, up(value) + (5 if labelled else 20), words, f"strong fill-{color}")
        if labelled:
            yield text(x + 10, up(value) + 20, f"held out, n = {evaluation.problems}", "quiet")
