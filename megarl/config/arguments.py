"""The command-line arguments by which every command names a config."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """`--config FILE` and `section.key=value` overrides, as every command takes them."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML file")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="e.g. trainer.optimizer.lr=1e-5; values are YAML, relative paths start at the current directory",
    )
