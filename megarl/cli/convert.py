"""`megarl convert`: the commands of tools/checkpoint/convert.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert` to the list of the `megarl` command, which calls `run` for it."""
    commands.add_parser("convert", help="convert, compare and inspect Hugging Face and Megatron-Core checkpoints")


def run(arguments: Sequence[str]) -> int:
    """Run a command of the converter and return its exit status."""
    from megarl.checkpoint.convert.cli import main

    return main(arguments, program="megarl convert", of_torchrun="-m megarl convert")
