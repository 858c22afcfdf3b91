"""Tells which nodes a running job can lose."""

from __future__ import annotations

from megarl.cluster.nodes.spec import LaunchSpec
from megarl.cluster.pool.pool_process import REBUILDING, read_state
from megarl.common.rundir import run_files


def can_lose(launch: LaunchSpec, index: int) -> bool:
    """Tell whether the job goes on without a node: nothing but engines runs there, and all engines were up once.

    Before that the plan does not fit, and after the end of the run its nodes have to end well.
    """
    record = run_files.read_exit(launch.run_dir)
    ended = record is not None and record.status != "failed"
    state = read_state(launch.run_dir) or {}
    ready = state.get("launch_id") == launch.launch_id and state.get("state") in {"ready", REBUILDING}
    return launch.topology.nodes[index].only_engines and ready and not ended
