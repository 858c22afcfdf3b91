"""The dry run of a config: check everything that can be checked here, print config and plan, start nothing."""

from __future__ import annotations

from typing import TextIO

from megarl.config.checks import DeviceType, absent_files, planned_elsewhere
from megarl.config.plan import make_plan
from megarl.config.plan_tables import print_dry_run
from megarl.config.schema import Config
from megarl.run.check_start import check_start


def dry_run(config: Config, stream: TextIO, *, device: DeviceType | None = None, files: bool = True) -> None:
    """Check `config` and write it resolved, with its plan, to `stream`. Raises ConfigError that lists every problem.

    `files=False` looks for no data, weights and tokenizer. A config with `model.shape` whose model is not here is
    planned by that, and what is absent becomes a note. Unless `device` is given, such a plan is for GPUs if the config
    says what memory they have, else for this machine's own device.
    """
    elsewhere = planned_elsewhere(config)
    if elsewhere and device is None and config.trainer.device_memory_gib is not None:
        device = "cuda"
    plan = make_plan(config, device=device, files=files and not elsewhere)
    notes: list[str] = []
    if files and elsewhere:
        absent = ", ".join(f"{key} ({path})" for key, path in absent_files(config))
        notes = [f"planned by model.shape; not here, so not checked, and needed where the run starts: {absent}"]
    elif files:
        notes = check_start(config, plan.info)
    print_dry_run(plan, config, stream, notes)
