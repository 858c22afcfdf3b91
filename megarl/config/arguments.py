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
