"""The command-line arguments that select a config; all commands share them."""

from __future__ import annotations

import argparse
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


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a training run."""
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan; start nothing")
    parser.add_argument(
        "--resume", metavar="auto|PATH|never", help="which checkpoint to resume from (default: checkpoint.resume)"
    )
    parser.add_argument("--dump-batches", action="store_true", help="keep whole batches for `megarl replay`")


def run_overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides that these options of a training run mean, those of `--resume` and `--dump-batches` last."""
    dump = ["telemetry.dump_batches=true"] if options.dump_batches else []
    resume = [f"checkpoint.resume={options.resume}"] if options.resume else []
    return [*options.overrides, *dump, *resume]


def run_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line of these options of a training run."""
    resume = ["--resume", options.resume] if options.resume else []
    flags = {"--dry-run": options.dry_run, "--dump-batches": options.dump_batches}
    given = [name for name, is_given in flags.items() if is_given]
    return ["--config", str(options.config), *resume, *given, *options.overrides]
