"""Renders evaluation reports for the terminal: as a table, and as one line of a run's progress."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from megarl.evaluation.accuracy import Estimate, EvalReport
from megarl.evaluation.harness import SetReport


def report_table(reports: Sequence[EvalReport]) -> Table:
    """Return a table with one row per report: metrics in percent with their intervals, lengths in tokens."""
    ks = sorted({k for report in reports for k in report.pass_at if k > 1})
    level = f"{100 * reports[0].confidence:g}%" if reports else ""
    table = Table(title=f"Evaluation ({level} confidence intervals)" if level else "Evaluation")
    table.add_column("set")
    headings = [
        "problems",
        "k",
        "mean@k",
        *(f"pass@{k}" for k in ks),
        "maj@k",
        "tokens",
        "max",
        "cut",
        "parsed",
        "failed",
        "errors",
    ]
    for heading in headings:
        table.add_column(heading, justify="right")
    for report in reports:
        passes = (report.pass_at.get(k) for k in ks)
        table.add_row(
            report.name,
            str(report.problems),
            str(report.samples_per_problem),
            format_estimate(report.mean),
            *("–" if estimate is None else format_estimate(estimate) for estimate in passes),
            format_estimate(report.majority),
            f"{report.mean_tokens:.1f}",
            str(report.max_tokens),
            f"{100 * report.truncated_share:.1f}%",
            f"{100 * report.parsed_share:.1f}%",
            str(report.failed_generations),
            str(report.reward_errors),
        )
    return table


def render_line(label: str, report: SetReport) -> str:
    """Return one line of plain text for the progress output of a run."""
    if report.nothing_judged is not None:
        return f"eval {report.name} ({label}): {report.nothing_judged}"
    greedy, sampled = report.greedy, report.sampled
    versions = "" if report.of_one_version else f", versions {report.oldest} to {report.newest}"
    return (
        f"eval {report.name} ({label}): greedy {format_estimate(greedy.mean)}, "
        f"sampled mean@{sampled.samples_per_problem} {format_estimate(sampled.mean)}, "
        f"{report.n} problems, {100 * greedy.parsed_share:.1f}% parsed, {100 * greedy.truncated_share:.1f}% truncated"
        f"{versions}{_failures(report)}"
    )


def _failures(report: SetReport) -> str:
    """Return the counts of failures that are not zero, as the end of a line; they count as they were scored."""
    counts = {"generations failed": report.failed_generations, "rewards failed": report.reward_errors}
    found = "".join(f", {count} of {report.responses} {what}" for what, count in counts.items() if count)
    return f"{found}; the first: {report.first_failure}" if found else ""


def format_estimate(estimate: Estimate) -> str:
    """Return an estimate in percent, like `52.3% [48.0, 56.6]`."""
    return f"{100 * estimate.value:.1f}% [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
