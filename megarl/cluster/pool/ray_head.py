"""The Ray cluster of one run, with ports, short temporary directories and an access token of its own.

The head is started by `ray.init()` in the supervisor's main thread, so that Ray's processes die with the supervisor.
The raylets of further nodes are started by megarl/cluster/nodes/raylet.py.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.errors import SupervisorFailed
from megarl.common.process.processes import descendants, sweep
from megarl.common.rundir.private_directory import make_private_directory, remove_private_directory
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.common.values import MIB
from megarl.config.derived.pools import engines_per_node, resolve_pools
from megarl.config.schema import Config
from megarl.rollout.engine.placement import ENGINE_RESOURCE, ROLLOUT_RESOURCE

if TYPE_CHECKING:
    from ray._private.node import Node


class ReservedPorts(ExitStack):
    """TCP ports of this host that the kernel gives to no other request for a free port, until `close`. A listener on
    one keeps it afterwards.

    Each has a socket that is bound but does not listen, with SO_REUSEADDR. Linux never chooses such a port itself. A
    process that asks for it and also sets SO_REUSEADDR gets it, as servers do: Ray's agents (2.60.0), torch's TCPStore
    (2.13.0) and slurm's daemons among them.
    """

    def __init__(self, count: int) -> None:
        """Raise OSError if the host has no `count` free ports."""
        super().__init__()
        self.ports: list[int] = []
        with ExitStack() as stack:
            for _ in range(count):
                held = stack.enter_context(socket.socket())
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(("", 0))
                self.ports.append(held.getsockname()[1])
            self.push(stack.pop_all())


logger = logging.getLogger(__name__)

TOKEN_FILE = "ray_token"
LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 256 * MIB
# Environment of processes that wait for the pool over a network. Without it Ray ends a process that has not reached its
# head for 60 s (Ray 2.60.0), before our call could report who waited for whom. Our own bounds end it.
PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
ATTEMPT_S = 30
MAX_ATTEMPTS = 5
RAY_PORTS = 3  # of services on each node that `patched_start` gives their ports


def access_environment(run_dir: Path, create: bool = False) -> dict[str, str]:
    """Return the environment with which a run's processes authenticate to its Ray; empty if the user has set their own.

    `create`: write a new token to RUN_DIR/ray_token first.
    """
    if any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        return {}
    path = run_dir.resolve() / TOKEN_FILE
    if create:
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def node_address() -> str:
    """Return the address at which this node's Ray listens; without an agent the run has one node only."""
    return os.environ.get(NODE_ADDRESS_VARIABLE, LOOPBACK)


@contextmanager
def loopback_kept() -> Iterator[None]:
    """Let `ray.init` use 127.0.0.1, so that Ray 2.60.0 binds its sockets to loopback instead of all interfaces.

    services.py replaces 127.0.0.1 by the address of the machine's route to the internet.
    """
    from ray._private import services

    original = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original


@dataclass(frozen=True)
class RayShare:
    """The resources that one node offers to Ray."""

    num_cpus: int
    num_gpus: int
    resources: dict[str, float]


def rollout_share(config: Config, *, cuda: bool) -> RayShare:
    """Return the share of a rollout node: its engines, and room for controller, queue controller and storage units."""
    pool = resolve_pools(config).rollout
    engines = engines_per_node(pool, config.rollout, config.teachers)
    cpus = engines + 1 + 1 + config.queue.storage_units + 2
    # Engines are counted by a resource of their own: without GPUs Ray would pack them onto one node.
    return RayShare(cpus, pool.gpus_per_node if cuda else 0, {ROLLOUT_RESOURCE: 10000, ENGINE_RESOURCE: engines})


# The share of a trainer node: its ranks connect to its raylet, nothing is scheduled on it.
TRAINER_SHARE = RayShare(0, 0, {})


def ray_environment() -> dict[str, str]:
    """Return the environment of a process that starts a part of a Ray cluster. Ray reads it at import."""
    return {
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        # Ray's default is nice 15: with the trainer on the same cores the engines would get too little time.
        "RAY_worker_niceness": "0",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_raylet_start_wait_time_s": str(ATTEMPT_S),
        # Ray's head gives up a node after 5 failed checks of up to 13 s, and its raylet then ends itself (Ray 2.60.0).
        # After a cut of 30 s connections need more time; the agents find a lost node on their own.
        "RAY_health_check_failure_threshold": "15",
    }


def keep_logs(private: Path, target: Path) -> None:
    """Copy the Ray logs of a node to `target`, for the user only, and remove its private directory.

    Ray gives its directories the mode 0777, which the copies do not get.
    """
    try:
        shutil.rmtree(target, ignore_errors=True)
        for logs in sorted(private.glob("ray/session_2*/logs")):
            shutil.copytree(
                logs, target, dirs_exist_ok=True, symlinks=True, ignore_dangling_symlinks=True,
                copy_function=shutil.copyfile,
            )  # fmt: skip
        for directory, _, _ in os.walk(target):
            os.chmod(directory, 0o700)
    except OSError as error:  # shutil.Error is one too; it lists every file
        logger.warning("Ray's logs could not all be kept in %s: %s", target, str(error)[:500])
    finally:
        remove_private_directory(private)


class RayHead:
    """The Ray head of a run: `start` it, use `address` to connect, `stop` it. Use it in the main thread only."""

    def __init__(
        self, share: RayShare, namespace: str, log_dir: Path, start_timeout_s: float, private: Path | None = None
    ) -> None:
        """`private`: the private directory of this run on this host; None: make one."""
        self.share = share
        self.namespace = namespace
        self.log_dir = log_dir
        self.start_timeout_s = start_timeout_s
        self.address = ""
        self.private = private or make_private_directory()
        self.ports = ReservedPorts(RAY_PORTS)

    def start(self) -> None:
        """Start Ray. Raises SupervisorFailed with Ray's reason if no attempt succeeds within `start_timeout_s`."""
        deadline = time.monotonic() + self.start_timeout_s
        for attempt in itertools.count(1):
            before = descendants(os.getpid())
            try:
                return self._init()
            except Exception as error:
                logger.exception("Ray head, attempt %d", attempt)
                sweep(descendants(os.getpid()) - before, grace_s=0.0)
                if attempt == MAX_ATTEMPTS or time.monotonic() + ATTEMPT_S > deadline:
                    raise SupervisorFailed(
                        f"the Ray head did not start in {attempt} attempts within {self.start_timeout_s:.0f} s: "
                        f"{error}; see {self.log_dir}"
                    ) from error

    def _init(self) -> None:
        os.environ.update(ray_environment())
        import ray

        with patched_start(self.ports), loopback_kept():
            context = ray.init(
                address="local",
                num_cpus=self.share.num_cpus,
                num_gpus=self.share.num_gpus,
                resources=dict(self.share.resources),
                namespace=self.namespace,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(self.private / "ray"),
                _node_ip_address=node_address(),
            )
        self.address = context.address_info["gcs_address"]

    def stop(self) -> None:
        """Move Ray's logs to the run directory and remove the private one. Call it after `ray.shutdown()`."""
        self.ports.close()
        keep_logs(self.private, self.log_dir / "ray")


@contextmanager
def patched_start(reserved: ReservedPorts) -> Iterator[None]:
    """Patch ray.init and Ray's Node (Ray 2.60.0), which lack arguments for this.

    `reserved`: RAY_PORTS ports, kept until Ray ends, because its agents open them some seconds after its start.

    The raylet aborts if its dashboard agent has not written its ports to files within a hard-coded 15 s, which is too
    short on a busy host (https://github.com/ray-project/ray/issues/65983). The raylet does not wait for ports that are
    given. The port of an HTTP service that is not used here cannot be given, so its file is written beforehand with the
    value -1 ("none"). The dashboard, the autoscaler's monitor and the log monitor are not needed and not started.
    """
    from ray._private import node, parameter
    from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

    params, start_processes = parameter.RayParams, node.Node.start_ray_processes
    start_dashboard = node.Node.start_api_server
    metrics, agent, runtime_env = reserved.ports
    ours = {
        "metrics_export_port": metrics,
        "metrics_agent_port": agent,
        "runtime_env_agent_port": runtime_env,
        "no_monitor": True,
        "include_log_monitor": False,
    }

    def start(self: Node) -> None:
        persist_port(self.get_session_dir_path(), self.node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, -1)
        start_processes(self)

    def no_dashboard(self: Node, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start nothing; Ray would start the process even with `include_dashboard=False`."""

    parameter.RayParams = lambda **fields: params(**{**fields, **ours})
    node.Node.start_ray_processes = start
    node.Node.start_api_server = no_dashboard
    try:
        yield
    finally:
        parameter.RayParams = params
        node.Node.start_ray_processes = start_processes
        node.Node.start_api_server = start_dashboard
