"""The command-line arguments that select a config; all commands share them."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--config FILE` and the `section.key=value` overrides to a command."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="override, e.g. trainer.optimizer.lr=1e-5; values are YAML, relative paths start at the current directory",
    )


def add_mistakes_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--all-mistakes` to a command that checks the data files."""
    parser.add_argument(
        "--all-mistakes",
        action="store_true",
        help="check whole data files and print every unusable row to stdout as FILE:LINE:COLUMN: problem (default: "
        "the first 50,000 rows, and ten rows of each kind of mistake)",
    )


def add_all_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--all` to a command that prints the plan."""
    parser.add_argument("--all", action="store_true", help="show the config's defaults with the plan")


def mistake_printer(options: argparse.Namespace) -> Callable[[object], None] | None:
    """Return the function that prints a wrong row, if the options have `--all-mistakes`."""
    return _print_line if options.all_mistakes else None


def _print_line(mistake: object) -> None:
    try:
        sys.stdout.write(f"{mistake}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; the rest is still counted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a training run."""
    add_config_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, show data, a prompt, reward and plan; start nothing"
    )
    add_all_argument(parser)
    add_mistakes_argument(parser)
    parser.add_argument(
        "--resume", metavar="auto|PATH|never", help="which checkpoint to resume from (default: checkpoint.resume)"
    )
    parser.add_argument("--dump-batches", action="store_true", help="keep whole batches for `megarl replay`")
    add_force_argument(parser)


def add_force_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--force` to a command that claims the run directory."""
    parser.add_argument(
        "--force",
        action="store_true",
        help="take the run directory even if another run holds it; that run then ends without saving",
    )


def run_overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides of a training run's options; those of `--resume` and `--dump-batches` come last."""
    dump = ["telemetry.dump_batches=true"] if options.dump_batches else []
    resume = [f"checkpoint.resume={options.resume}"] if options.resume else []
    return [*options.overrides, *dump, *resume]
