"""The place of a run of the soak: on this machine under torchrun, or on several hosts (lib/hosts.py).

A place says how the job is started, and how its processes are found: a host has process ids of its own, so those that
the run has written down say nothing to whoever looks at it from outside.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chaos.processes import (
    Replica,
    find_agent,
    find_processes,
    find_replicas,
    parts_among,
    replicas_among,
    with_title,
)
from benchmarks.lib.hosts import Hosts
from benchmarks.lib.whole_run import ROOT, SCRIPT, environment

TRAINER, POOL, ENGINES = 0, 1, 2  # the hosts: both ranks; the supervisor, controller, queue and an engine; an engine
NODE_S = 20.0  # after which a host that is silent is lost
HOSTS_RPC_S = 60.0  # longer than a link is cut for
HOSTS_SYNC_S = 150.0
AGENT = "megarl.cluster.nodes.launcher"


class RunPlace:
    """Says how a run is started, and how its processes are found: on this machine, under torchrun."""

    several_hosts: SeveralHosts | None = None  # itself if it has hosts that can be lost and links that can be cut

    def command(self, config: Path, ranks: int, restarts: int) -> list[str]:
        """Return what starts the job, as a user would."""
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "megarl"]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
        return [*command, str(SCRIPT), "--config", str(config)]

    def variables(self) -> dict[str, str]:
        """Return what the job needs in its environment."""
        return {}

    def changes(self, restarts: int) -> dict[str, dict[str, Any]]:
        """Return what the place changes in the config."""
        return {}

    def find_replicas(self, run_dir: Path) -> dict[int, Replica]:
        """Return the replicas that have an engine, by number."""
        return find_replicas(run_dir)

    def find_processes(self, run_dir: Path, target: str) -> list[psutil.Process]:
        """Return the processes of a part that is no replica, in the order of their pids."""
        return find_processes(run_dir, target)

    def find_agent(self, run_dir: Path) -> psutil.Process | None:
        """Return the process that has started the ranks, None if it does not run."""
        return find_agent(run_dir)


class SeveralHosts(RunPlace):
    """Three hosts under launch/multinode.sh: one with the ranks, two with an engine each."""

    COUNT = 3

    def __init__(self, hosts: Hosts) -> None:
        self.hosts, self.several_hosts = hosts, self

    def command(self, config: Path, ranks: int, restarts: int) -> list[str]:
        return [str(ROOT / "launch" / "multinode.sh"), ",".join(self.hosts.addresses), str(config)]

    def variables(self) -> dict[str, str]:
        return {"MEGARL_RSH": str(self.hosts.rsh), "PYTHON": sys.executable}

    def changes(self, restarts: int) -> dict[str, dict[str, Any]]:
        return {
            "trainer": {"gpus_per_node": 2},
            "rollout": {"gpus_per_node": 1},
            "launch": {"max_restarts": restarts},
            "timeouts": {
                "node_s": NODE_S,
                "rpc_s": HOSTS_RPC_S,
                "weight_sync_s": HOSTS_SYNC_S,
                "engine_start_s": 720.0,
            },
        }

    def find_replicas(self, run_dir: Path) -> dict[int, Replica]:
        return replicas_among(self.hosts.everything())

    def find_processes(self, run_dir: Path, target: str) -> list[psutil.Process]:
        if target == "job":
            return self.hosts.everything()
        if target == "rank":
            here = with_title(self.hosts.processes(TRAINER), "train_rl.py")
            return [each for each in here if not with_title([each], "megarl.cluster.torchrun.run")]
        return parts_among(self.hosts.everything(), target)

    def find_agent(self, run_dir: Path) -> psutil.Process | None:
        found = with_title(self.hosts.processes(TRAINER), AGENT)
        # Not what connects to the host, which has the agent's whole command line as one argument. A child that the
        # agent has just forked looks like it, and has a higher pid.
        return next((each for each in found if AGENT in _arguments(each)), None)

    @contextmanager
    def cut_link(self) -> Iterator[None]:
        """Cut the link between the trainer and all others within the block.

        Raises RuntimeError if it is not that which makes the difference whether they reach each other.
        """
        joined = self.hosts.reaches(TRAINER, POOL)
        self.hosts.cut(TRAINER)
        try:
            if not joined or self.hosts.reaches(TRAINER, POOL):
                raise RuntimeError(f"the link was {'NOT cut' if joined else 'down before it was cut'}")
            yield
        finally:
            self.hosts.mend(TRAINER)

    def start_agent(self, run_dir: Path, index: int) -> None:
        """Start what a host that is back needs to be of the job again, as an administrator does."""
        launch = max((run_dir / "launch").glob("*/launch.json"), key=os.path.getmtime)
        agent = f"cd {ROOT} && exec {sys.executable} -m {AGENT} {launch} {index}"
        with run_dir.with_suffix(f".node-{index}").open("ab") as output:
            subprocess.Popen(
                [self.hosts.rsh, self.hosts.addresses[index], agent],
                env=environment() | self.variables(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _arguments(process: psutil.Process) -> list[str]:
    """Return the arguments of a process; none if it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
