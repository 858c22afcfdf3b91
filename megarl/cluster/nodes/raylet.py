"""A raylet that joins the run's Ray cluster from a further node; Ray's processes end with this one.

`python -m megarl.cluster.nodes.raylet LAUNCH_FILE INDEX AGENT_PID` is started by the node's agent. On a trainer node
it offers no CPUs and no GPUs: ranks connect to it, nothing is scheduled there. `ray start` is not used, because its
raylet aborts on a busy host (see `megarl.cluster.pool.ray_head.patched_start`) and its processes would outlive the
agent.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from megarl.cluster.nodes.spec import LaunchSpec
from megarl.cluster.pool.pool_process import attach_supervisor
from megarl.cluster.pool.ray_head import (
    OBJECT_STORE_BYTES,
    PATIENCE,
    RAY_PORTS,
    TRAINER_SHARE,
    RayShare,
    ReservedPorts,
    access_environment,
    keep_logs,
    patched_start,
    ray_environment,
    rollout_share,
)
from megarl.common.process.processes import die_with_parent
from megarl.common.rundir.private_directory import make_private_directory, sweep_dead_directories, use_private_directory
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.rollout.engine.placement import visible_devices

if TYPE_CHECKING:
    from ray._private.node import Node

logger = logging.getLogger("megarl.cluster.nodes.raylet")

CHECK_S = 1.0


def main() -> int:
    """Run the raylet until SIGTERM; return 1 if one of Ray's processes ended on its own, else 0."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    die_with_parent(int(sys.argv[3]))
    launch = LaunchSpec.load(Path(sys.argv[1]))
    node = launch.topology.nodes[int(sys.argv[2])]
    timeout_s = launch.config.timeouts.ray_start_s + launch.config.timeouts.node_s
    handle = attach_supervisor(launch.run_dir, launch.launch_id, timeout_s)
    os.environ.update({**ray_environment(), **PATIENCE, **access_environment(launch.run_dir)})
    share = TRAINER_SHARE
    if node.rollout_devices:
        share = rollout_share(launch.config, cuda=launch.cuda)
        if launch.cuda:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(node.rollout_devices)
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    sweep_dead_directories()
    private = make_private_directory()
    use_private_directory(private)
    ports = ReservedPorts(RAY_PORTS)  # until this process ends
    ray_node = _start(handle.address, share, private / "ray", ports)
    signal.signal(signal.SIGTERM, end)
    logger.info("raylet of node %d has joined %s with %s", node.index, handle.address, share)
    code = 0
    while not ended.wait(CHECK_S):
        if dead := [name for name, _ in ray_node.dead_processes()]:
            logger.error("%s ended by itself", ", ".join(dead))
            code = 1
            break
    ray_node.kill_all_processes(check_alive=False, allow_graceful=True)
    keep_logs(private, launch.run_dir / "logs" / f"ray-node-{node.index}")
    return code


def _start(address: str, share: RayShare, temp_dir: Path, ports: ReservedPorts) -> Node:
    """Start Ray's processes of a node that is not the head."""
    with patched_start(ports):
        from ray._private import node, parameter

        parameters = parameter.RayParams(
            gcs_address=address,
            node_ip_address=os.environ[NODE_ADDRESS_VARIABLE],
            num_cpus=share.num_cpus,
            num_gpus=share.num_gpus,
            resources=dict(share.resources),
            object_store_memory=OBJECT_STORE_BYTES,
            temp_dir=str(temp_dir),
        )
        return node.Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)


if __name__ == "__main__":
    sys.exit(main())
