"""Renders evaluation reports for the terminal: as tables, and as one line of a run's progress."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megarl.evaluation.accuracy import Estimate, EvalReport
from megarl.evaluation.harness import SetReport

WIDTH = 100  # of the tables, at most; only names of sets are wrapped


def report_table(reports: Sequence[EvalReport]) -> RenderableType:
    """Return a table with a row per report, a table of pass@k, and a line for each report with failures.

    Shares are in percent with intervals, means of graded rewards are plain numbers, lengths are in tokens.
    """
    parts: list[RenderableType] = [_means(reports)]
    ks = sorted({k for report in reports for k in report.pass_at if k > 1})
    if ks:
        parts.append(_passes(reports, ks))
    for report in reports:
        if report.failures:
            counts = f"{report.failed_generations} generations and {report.reward_errors} rewards"
            parts.append(Text(f"{report.name}: {counts} of {report.responses} responses failed", style="yellow"))
    return Group(*parts)


def _means(reports: Sequence[EvalReport]) -> Table:
    level = f"{100 * reports[0].confidence:g}%" if reports else ""
    table = _table(f"Evaluation ({level} confidence intervals)" if level else "Evaluation")
    for heading in ("n", "k", "mean@k", "maj@k", "tokens", "max", "cut", "parsed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(
            report.name,
            str(report.problems),
            str(report.samples_per_problem),
            format_mean(report),
            format_estimate(report.majority),
            f"{report.mean_tokens:.0f}",
            str(report.max_tokens),
            f"{100 * report.truncated_share:.0f}%",
            f"{100 * report.parsed_share:.0f}%",
        )
    return table


def _passes(reports: Sequence[EvalReport], ks: Sequence[int]) -> Table:
    """Return a table with a row per report and k, because columns for all k would be too wide."""
    table = _table("pass@k: one of k has reward 1")
    table.add_column("k", justify="right")
    table.add_column("pass@k", justify="right", no_wrap=True)
    for report in reports:
        for number, k in enumerate(k for k in ks if k in report.pass_at):
            table.add_row("" if number else report.name, str(k), format_estimate(report.pass_at[k]))
    return table


def _table(title: str) -> Table:
    table = Table(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, collapse_padding=True
    )
    table.add_column("set", overflow="fold")
    return table


def render_line(label: str, report: SetReport) -> str:
    """Return one line of plain text for the progress output of a run."""
    if report.nothing_judged is not None:
        return f"eval {report.name} ({label}): {report.nothing_judged}"
    greedy, sampled = report.greedy, report.sampled
    versions = "" if report.of_one_version else f", versions {report.oldest} to {report.newest}"
    return (
        f"eval {report.name} ({label}): greedy {format_mean(greedy)}, "
        f"sampled mean@{sampled.samples_per_problem} {format_mean(sampled)}, "
        f"{report.n} problems, {100 * greedy.parsed_share:.1f}% parsed, {100 * greedy.truncated_share:.1f}% truncated"
        f"{versions}{_failures(report)}"
    )


def _failures(report: SetReport) -> str:
    """Return the non-zero counts of failures, as the end of a line."""
    counts = {"generations failed": report.failed_generations, "rewards failed": report.reward_errors}
    found = "".join(f", {count} of {report.responses} {what}" for what, count in counts.items() if count)
    return f"{found}; the first: {report.first_failure}" if found else ""


def format_mean(report: EvalReport) -> str:
    """Return the mean score, in percent if it is a share of correct responses, else like `0.523 [0.480, 0.566]`."""
    if not report.graded:
        return format_estimate(report.mean)
    return f"{report.mean.value:.3g} [{report.mean.low:.3g}, {report.mean.high:.3g}]"


def format_estimate(estimate: Estimate) -> str:
    """Return an estimate in percent, like `52.3% [48.0, 56.6]`."""
    return f"{100 * estimate.value:.1f}% [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
