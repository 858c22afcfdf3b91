"""`megarl trace`: write the events of a run as a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from megarl.common.errors import ConfigError

DEFAULT_NAME = "trace.json.gz"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `trace` to the `megarl` command."""
    trace = commands.add_parser(
        "trace",
        help="write a run's time line for Perfetto or chrome://tracing",
        description="Write the events of a run, live or ended, as a trace: phases of the trainer ranks, "
        "publications, engines, trajectories with their turns, tools and rewards, saves, evaluations and faults. "
        "Open it at https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing.",
        epilog="The trace of a whole day is large: choose steps with --from and --to.",
    )
    trace.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    trace.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the trace; .gz compresses it (default: RUN_DIR/{DEFAULT_NAME})"
    )
    trace.add_argument(
        "--from", type=int, dest="first", metavar="STEP", help="begin with this step; the first one is 1"
    )
    trace.add_argument("--to", type=int, dest="last", metavar="STEP", help="end with this step")
    trace.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the trace and print its path. Raises ConfigError with the fix if there is nothing to write."""
    from megarl.telemetry.trace.chrome_trace import TraceWindow, trace_events
    from megarl.telemetry.trace.files import event_files

    run_dir: Path = options.run_dir
    if not run_dir.is_dir():
        raise ConfigError([f"there is no run directory {run_dir}"])
    if not event_files(run_dir):
        raise ConfigError([f"{run_dir} has no events: the run has telemetry.events_mib=0, or has just started"])
    try:
        window = TraceWindow.of_steps(run_dir, options.first, options.last)
    except ValueError as error:
        raise ConfigError([f"{error}; --from and --to are steps as in metrics.jsonl"]) from None
    out: Path = options.out or run_dir / DEFAULT_NAME
    try:
        count = write_trace(out, trace_events(run_dir, window))
    except OSError as error:
        raise ConfigError([f"{out} cannot be written: {error.strerror}; give another --out"]) from None
    sys.stdout.write(f"{out}: {count} trace events; open it at https://ui.perfetto.dev\n")
    return 0


def write_trace(path: Path, events: Iterable[dict[str, Any]]) -> int:
    """Write a trace, compressed if the name ends in .gz; return the number of its events. Raises OSError.

    Replaces an existing trace once the new one is complete.
    """
    partial = path.with_name(f".{path.name}.partial")
    encoder, count = msgspec.json.Encoder(), 0
    with gzip.open(partial, "wb", compresslevel=3) if path.suffix == ".gz" else partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for count, event in enumerate(events, start=1):
            file.write((b",\n" if count > 1 else b"") + encoder.encode(event))
        file.write(b"\n]}\n")
    partial.replace(path)
    return count
