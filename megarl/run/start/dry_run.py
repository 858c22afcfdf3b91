"""The dry run of a config: check everything that can be checked here, print config and plan, start nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarl.common.errors import Findings
from megarl.config.checks.sections import DeviceType, absent_files, planned_elsewhere
from megarl.config.loading.load import overridden_tree
from megarl.config.memory_plan.plan import RunPlan, make_plan, print_dry_run
from megarl.config.schema import Config
from megarl.data.check_files import Tell
from megarl.run.start.check_remote import elsewhere_findings
from megarl.run.start.checks import start_findings


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

    `files=False` looks for no data, weights and tokenizer, and tries no reward. A config with `model.shape` whose model
    is not here is planned by that, and what is absent becomes a note, or a mistake if one of the config's `overrides`
    names it; data files that are here, and the rewards, are checked all the same. Unless `device` is given, such a plan
    is for GPUs if the config says what memory they have, else for this machine's own device. `tell`: as in
    `check_start`.
    """
    elsewhere = planned_elsewhere(config.model)
    if elsewhere and device is None and config.trainer.device_memory_gib is not None:
        device = "cuda"
    plan = make_plan(config, device=device, files=files and not elsewhere)
    if not files:
        return plan, []
    if not elsewhere:
        found = start_findings(config, plan.info, tell)
        found.refuse()
        return plan, [*found.warnings, *found.notes]
    absent = absent_files(config)
    found = Findings(list(_mistyped(absent, overrides)))
    found.add(elsewhere_findings(config, tell))
    found.refuse()
    listed = ", ".join(f"{key} ({path})" for key, path in absent)
    note = f"planned by model.shape; not here, so not checked, and needed where the run starts: {listed}"
    return plan, [note, *found.warnings, *found.notes]


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
