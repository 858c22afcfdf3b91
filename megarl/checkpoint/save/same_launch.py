"""Applies `checkpoint.resume: never`, or a path, to the first start of a launch only, not to its restarts.

torchrun restarts the ranks after a failure, and SLURM restarts a requeued job, with the same command. As soon as the
launch has a checkpoint of its own, a restart resumes from that checkpoint.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.cluster.nodes.commands import LAUNCH_ID_VARIABLE
from megarl.common.files import write_json
from megarl.common.process.processes import ProcessId
from megarl.config.schema import Config

FILE = "launched_by.json"


def remember_launch(run_dir: Path) -> None:
    """Record that the history in `run_dir` is this launch's. Called on rank 0 after `checkpoint.resume` was applied."""
    write_json(run_dir / FILE, _launch(os.environ))


def config_of_this_start(config: Config) -> Config:
    """Return `config`, with `checkpoint.resume: auto` if this launch has a checkpoint of its own."""
    if config.checkpoint.resume == "auto" or not CheckpointDirectory(config.checkpoint_dir).steps():
        return config
    try:
        before = json.loads((config.run_dir / FILE).read_text())
    except (OSError, ValueError):
        return config
    if not same_launch(before, _launch(os.environ), requeued=os.environ.get("SLURM_RESTART_COUNT", "0") != "0"):
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def same_launch(before: Mapping[str, Any], present: Mapping[str, Any], *, requeued: bool) -> bool:
    """Tell whether two starts of ranks belong to one launch: of a launch script, a requeued job or a torchrun agent."""
    if present["launch"] is None:
        return before["launch"] is None and bool(before["agent"] == present["agent"])
    return bool(before["launch"] == present["launch"] or (requeued and before["job"] == present["job"] is not None))


def _launch(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts that identify the launch of this process, as JSON."""
    agent = ProcessId.of(os.getppid())
    return {
        "launch": environment.get(LAUNCH_ID_VARIABLE),
        "job": environment.get("SLURM_JOB_ID"),
        "agent": [socket.gethostname(), agent.pid, agent.start_time],
    }
