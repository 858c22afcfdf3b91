"""`checkpoint.resume: never` and a path are wishes for the first start of a launch, not for its restarts.

torchrun restarts the ranks after a failure, and SLURM starts a requeued job again, with the same command. From the
launch's own first checkpoint on they go on from that.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoint.save.directory import CheckpointDirectory
from megarl.cluster.nodes.node_commands import LAUNCH_ID_VARIABLE
from megarl.common.files import write_json
from megarl.common.processes import ProcessId
from megarl.config.schema import Config

FILE = "launched_by.json"


def remember_launch(run_dir: Path) -> None:
    """Rank 0, once `checkpoint.resume` has been done: the history in `run_dir` is this launch's from here on."""
    write_json(run_dir / FILE, _launch(os.environ))


def config_of_this_start(config: Config) -> Config:
    """`config`, with `checkpoint.resume: auto` if this launch already has a checkpoint of its own."""
    if config.checkpoint.resume == "auto" or not CheckpointDirectory(config.checkpoint_dir).steps():
        return config
    try:
        before = json.loads((config.run_dir / FILE).read_text())
    except (OSError, ValueError):
        return config
    if not same_launch(before, _launch(os.environ), requeued=os.environ.get("SLURM_RESTART_COUNT", "0") != "0"):
        return config
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})


def same_launch(before: Mapping[str, Any], now: Mapping[str, Any], *, requeued: bool) -> bool:
    """Whether two starts of ranks are one launch: of a launch script, of a job requeued, or of a torchrun agent."""
    if now["launch"] is None:
        return before["launch"] is None and bool(before["agent"] == now["agent"])
    return bool(before["launch"] == now["launch"] or (requeued and before["job"] == now["job"] is not None))


def _launch(environment: Mapping[str, str]) -> dict[str, Any]:
    agent = ProcessId.of(os.getppid())
    return {
        "launch": environment.get(LAUNCH_ID_VARIABLE),
        "job": environment.get("SLURM_JOB_ID"),
        "agent": [socket.gethostname(), agent.pid, agent.start_time],
    }
