"""docs/training/async.md: its numbers are those of the modes, and its commands are accepted."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

from megarl.cli import train
from megarl.config.derived.staleness import Pace, pace_of, pace_problems
from megarl.config.loading.load import load_config
from megarl.config.schema import Config
from tests.support.checkout import ROOT

PAGE = (ROOT / "docs/training/async.md").read_text()
QUICKSTART = ROOT / "examples/rl/configs/quickstart_cpu.yaml"
COMMANDS = re.findall(r"^megarl (train .*?[^\\])$", PAGE, re.DOTALL | re.MULTILINE)


def config_of(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


def test_the_table_has_the_defaults_of_each_mode() -> None:
    rows = re.findall(r"^\| `(\w+)`(?: \(default\))? \| after every step \|.*?\| (\d+) \|", PAGE, re.MULTILINE)
    rows += re.findall(r"^\| `(\w+)` \| every 4 updates \|.*?\| (\d+) \|", PAGE, re.MULTILINE)
    shown = {mode: Pace(1, 1 if mode in ("sync", "one_step_off") else 4, int(bound)) for mode, bound in rows}
    modes = ("sync", "one_step_off", "stream", "async")
    assert shown == {mode: pace_of(config_of(f"admission.mode={mode}")) for mode in modes}
    assert config_of().admission.mode == "sync"


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_are_accepted(command: str) -> None:
    parser = argparse.ArgumentParser()
    train.add_parser(parser.add_subparsers())
    options = parser.parse_args(shlex.split(command.replace("\\\n", " ")))
    assert list(pace_problems(config_of(*options.overrides))) == []
