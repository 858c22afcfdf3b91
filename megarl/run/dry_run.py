"""The dry run of a config: check everything that can be checked here, print config and plan, start nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarl.common.errors import ConfigError
from megarl.config.checks import DeviceType, absent_files, planned_elsewhere
from megarl.config.load import overridden_tree
from megarl.config.plan import RunPlan, make_plan
from megarl.config.plan_tables import print_dry_run
from megarl.config.schema import Config
from megarl.data.check_files import Tell, data_file_problems
from megarl.run.check_start import check_start


def dry_run(
    config: Config,
    stream: TextIO,
    *,
    overrides: Sequence[str] = (),
    device: DeviceType | None = None,
    files: bool = True,
    tell: Tell | None = None,
) -> None:
    """Check `config` as `checked_plan` does, and write it resolved, with its plan, to `stream`."""
    plan, notes = checked_plan(config, overrides=overrides, device=device, files=files, tell=tell)
    print_dry_run(plan, config, stream, notes)


def checked_plan(
    config: Config,
    *,
    overrides: Sequence[str] = (),
    device: DeviceType | None = None,
    files: bool = True,
    tell: Tell | None = None,
) -> tuple[RunPlan, list[str]]:
    """Check all that can be checked here; return the plan and its notes. Raises ConfigError that lists every problem.

    `files=False` looks for no data, weights and tokenizer. A config with `model.shape` whose model is not here is
    planned by that, and what is absent becomes a note, or a mistake if one of the config's `overrides` names it; data
    files that are here are checked all the same. Unless `device` is given, such a plan is for GPUs if the config says
    what memory they have, else for this machine's own device. `tell`: as in `check_start`.
    """
    elsewhere = planned_elsewhere(config)
    if files and elsewhere:
        problems = list(_mistyped(absent_files(config), overrides))
        problems += data_file_problems(config, tell, only_present=True)
        if problems:
            raise ConfigError(problems)
    if elsewhere and device is None and config.trainer.device_memory_gib is not None:
        device = "cuda"
    plan = make_plan(config, device=device, files=files and not elsewhere)
    if files and elsewhere:
        absent = ", ".join(f"{key} ({path})" for key, path in absent_files(config))
        return plan, [f"planned by model.shape; not here, so not checked, and needed where the run starts: {absent}"]
    return plan, check_start(config, plan.info, tell) if files else []


def _mistyped(absent: Sequence[tuple[str, Path]], overrides: Sequence[str]) -> Iterator[str]:
    """Yield a problem for each absent path that is the user's own: a shipped recipe does not need its files here."""
    given = overridden_tree(overrides)
    for key, path in absent:
        if _names(given, key):
            yield (
                f"{key}: no such file or directory: {path} (on the command line; current directory: {os.getcwd()}); "
                "correct it, or plan without files: megarl plan --no-files"
            )


def _names(tree: object, key: str) -> bool:
    """Tell whether a tree of plain values has a dotted key, in which numbers are places in lists."""
    node: Any = tree  # of any type, as YAML has it
    for name in key.split("."):
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            return False
    return True
