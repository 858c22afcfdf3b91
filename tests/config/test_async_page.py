"""docs/training/async.md: its numbers are those of the modes, and its commands are accepted."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from megarl.cli import train
from megarl.config.derived.staleness import pace_problems
from megarl.config.loading.load import load_config
from megarl.config.schema import Config
from tests.support.checkout import ROOT

PAGE = (ROOT / "docs/training/async.md").read_text()
QUICKSTART = ROOT / "examples/rl/configs/quickstart_cpu.yaml"
COMMANDS = re.findall(r"^megarl (train .*?[^\\])$", PAGE, re.DOTALL | re.MULTILINE)


def config_of(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_accepted(command: str) -> None:
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    options = parser.parse_args(shlex.split(command.replace("\\\n", " ")))
    assert list(pace_problems(config_of(*options.overrides))) == []
