"""`megarl report`: one HTML page about one or several runs, finished or live."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from megarl.common.errors import ConfigError
from megarl.common.files import replace_file

MOST_RUNS = 8  # side by side: more colors could not be distinguished
MOST_SAMPLES = 48  # of all runs together, at least 8 of each
BUCKETS = 800


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `report` to the `megarl` command."""
    report = commands.add_parser(
        "report",
        help="write one HTML page about one or several runs, finished or live",
        description="Read the files of runs and write one HTML page that needs no network and no other file: reward "
        "and evaluation, throughput, waiting, version lag, lengths, slow trajectories, samples, advisories, faults. "
        "Several runs are shown side by side. The run may continue meanwhile; nothing but the page is written to its "
        "directory.",
    )
    report.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="the directory of a run")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html in the directory of the first run)"
    )
    report.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page and print its path; return the exit status."""
    from megarl.report.page.page import render
    from megarl.report.reading.run_directory import distinct_names, read_run

    run_dirs: list[Path] = options.run_dirs
    if len(run_dirs) > MOST_RUNS:
        raise ConfigError(
            [f"{len(run_dirs)} runs given; at most {MOST_RUNS} can be shown side by side"], "megarl report"
        )
    count = max(8, MOST_SAMPLES // len(run_dirs))
    buckets = BUCKETS if len(run_dirs) <= 2 else BUCKETS // 2
    names = distinct_names(run_dirs)
    runs = [read_run(each, name, buckets=buckets, samples=count) for each, name in zip(run_dirs, names, strict=True)]
    out: Path = options.out or run_dirs[0] / "report.html"
    _write(out, render(runs, time.time()))
    sys.stdout.write(f"{out}\n")
    return 0


def _write(out: Path, page: str) -> None:
    """Replace the page atomically, so that a browser never loads half of it. Raises ConfigError if that fails."""
    try:
        replace_file(out, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ConfigError(
            [f"{out} cannot be written: {error}; name another file with --out"], "megarl report"
        ) from None
