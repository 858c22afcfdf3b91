"""Tells a start of a run that has nothing left to do, before anything is started or moved."""

from __future__ import annotations

from megarl.checkpoint.format.manifest import MANIFEST
from megarl.common.rundir.run_files import ExitRecordError, read_exit
from megarl.config.schema import Config
from megarl.models.hf.model_files import step_name


def already_finished(config: Config) -> str | None:
    """Return what to tell the user if the run of this config has finished and is saved; None if a start has work.

    That is one whose last start has recorded its end after `run.steps` or more, with the checkpoint of that step, and
    with the export that the config asks for.
    """
    if config.checkpoint.resume != "auto":
        return None
    try:
        record = read_exit(config.run_dir)
    except (ExitRecordError, OSError):
        return None
    if record is None or record.status != "finished" or record.step < config.run.steps:
        return None
    if not (config.checkpoint_dir / step_name(record.step) / MANIFEST).is_file():
        return None
    if config.run.export and not (config.run_dir / "hf").is_dir():
        return None
    return (
        f"already finished: {record.step} of {config.run.steps} steps in {config.run_dir}; nothing was started or "
        "moved. To go on, raise run.steps; to start afresh, set checkpoint.resume=never, which moves the results to "
        f"{config.run_dir / 'previous'}, or another run.dir"
    )
