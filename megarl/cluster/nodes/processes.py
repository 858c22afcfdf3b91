"""The processes of one node: its raylet or the supervisor, and torchrun, all of them children of the node's launcher.

The launcher (`launcher.py`) judges what the end of one means for the job.
"""

import functools
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from megarl.cluster.nodes import commands
from megarl.cluster.nodes.spec import LaunchSpec
from megarl.cluster.nodes.topology import NodePlan
from megarl.cluster.pool.pool_process import STOP_FILE as SUPERVISOR_STOP
from megarl.cluster.pool.pool_process import start_supervisor
from megarl.common.clocks import WatchedTime
from megarl.common.process.processes import (
    ProcessId,
    descendants,
    die_with_parent,
    is_alive,
    kill,
    state_of,
    still_alive,
    sweep,
)
from megarl.common.rundir.run_lock import LAUNCH_ID_VARIABLE, Holder, other_holder
from megarl.rollout.engine.placement import visible_devices

# Finds processes that have been stopped (SIGSTOP) for a long time.

LOOK_S = 2.0  # between two looks
_STOPPED = ("T", "t")  # by a signal, by a debugger


class StoppedProcesses:
    """Measures how long each process has been stopped, in time that its owner has seen pass."""

    def __init__(self, bound_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`bound_s`: the time after which `find` returns a process."""
        self._bound_s, self._clock = bound_s, clock
        self._time = WatchedTime(2 * LOOK_S, clock)
        self._since: dict[ProcessId, float] = {}
        self._next = clock()

    def is_due(self) -> bool:
        """Return whether it is time to look, at most every LOOK_S."""
        return self._clock() >= self._next

    def find(self, processes: Iterable[ProcessId]) -> list[ProcessId]:
        """Return the processes that were stopped at each look for the bound."""
        self._next = self._clock() + LOOK_S
        now = self._time.look()
        stopped = [process for process in processes if state_of(process) in _STOPPED]
        self._since = {process: self._since.get(process, now) for process in stopped}
        return [process for process, since in self._since.items() if now - since > self._bound_s]


logger = logging.getLogger(__name__)

TERMINATE_S = 3.0  # between SIGTERM and SIGKILL
REJOIN_S = 10.0  # between the end of a raylet and the start of the next one


class NodeProcesses:
    """Starts the processes of a node and ends them. One that was not started is None."""

    def __init__(self, launch: LaunchSpec, node: NodePlan, holder: Holder) -> None:
        """`holder`: the launch, as it claims the run directory; another run that holds it is not written to."""
        self._launch, self._node, self._holder = launch, node, holder
        self._timeouts = launch.config.timeouts
        self.torchrun: subprocess.Popen[bytes] | None = None
        self.raylet: subprocess.Popen[bytes] | None = None
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.children: set[ProcessId] = set()  # all descendants that were seen and live
        self.raylet_children: set[ProcessId] = set()
        self._raylet_ended_at: float | None = None
        # Longer than the bound of the rank watch (megarl/run/ranks/watch.py), and not later than the ranks end.
        self._stopped = StoppedProcesses(self._timeouts.node_s + self._timeouts.shutdown_s / 2)

    def look(self) -> None:
        """Note the current descendants, to find those at the end that left their parents."""
        self.children = still_alive(self.children | descendants(os.getpid()))

    def start_supervisor(self) -> None:
        """Start the supervisor, on the node that has it."""
        launch = self._launch
        self.supervisor = start_supervisor(
            launch.config_json, launch.run_dir, os.getpid(), launch.launch_id, cuda=launch.cuda
        )

    def start_raylet(self) -> None:
        """Start the raylet, which joins the Ray head, on every other node."""
        raylet = commands.raylet_command(str(self._launch.path), self._node.index, os.getpid())
        log = self._launch.run_dir / "logs" / f"raylet-node-{self._node.index}.log"
        with log.open("ab") as output:
            self.raylet = self._spawn(raylet, dict(os.environ), output)
        self._raylet_ended_at = None

    def raylet_code(self) -> int | None:
        """Return the exit code of the raylet; None while it runs, and on a node without one."""
        if self.raylet is None:
            return None
        code = self.raylet.poll()
        if code is None:
            self.raylet_children = still_alive(self.raylet_children | descendants(self.raylet.pid))
        return code

    def rejoin(self, code: int) -> None:
        """Clean up after the raylet, which ended with `code`, and start another one after REJOIN_S. Called at
        intervals.
        """
        now = time.monotonic()
        if self._raylet_ended_at is None:
            self._raylet_ended_at = now
            logger.warning("Ray's raylet ended with code %d; starting another one in %.0f s", code, REJOIN_S)
            sweep(self.raylet_children, grace_s=TERMINATE_S)  # engines that would keep their GPUs
            self.raylet_children = set()
        elif now > self._raylet_ended_at + REJOIN_S:
            self.start_raylet()

    def start_torchrun(self, endpoint: str, address: str) -> None:
        """Start torchrun with the rendezvous at `endpoint` (HOST:PORT); `address`: that of this node."""
        launch = self._launch
        command = commands.torchrun_command(
            launch.config.launch, self._timeouts, launch.topology, self._node, launch_id=launch.launch_id,
            endpoint=endpoint, address=address, entry=launch.entry,
            config_file=str(Path(launch.directory) / "config.yaml"),
        )  # fmt: skip
        environment = {**os.environ, LAUNCH_ID_VARIABLE: launch.launch_id}
        environment |= commands.torchrun_environment(launch.run_dir)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if launch.cuda:
            environment["CUDA_VISIBLE_DEVICES"] = visible_devices(self._node.trainer_devices)
        logger.info("starting %s", " ".join(command))
        self.torchrun = self._spawn(command, environment)

    def _spawn(
        self, command: list[str], environment: dict[str, str], output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a child that dies with this process, in a session that this process's Ctrl-C does not reach."""
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=environment,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (this process has one thread)
        )  # fmt: skip

    def kill_stopped_ranks(self) -> None:
        """Kill ranks that stay stopped, after other ranks had time to name them. No other rank can kill a rank that is
        alone on its node, and torchrun would give it time to save.
        """
        if self.torchrun is None or self.torchrun.poll() is not None or not self._stopped.is_due():
            return
        for process in self._stopped.find(descendants(self.torchrun.pid)):
            logger.error("process %d of a trainer rank was stopped for too long; killing it", process.pid)
            kill([process], signal.SIGKILL)

    def end_all(self) -> None:
        """End everything on this node: kill the ranks, stop raylet and supervisor, then kill the rest."""
        if self.torchrun is not None and self.torchrun.poll() is None:
            ranks = descendants(self.torchrun.pid)
            sweep({ProcessId.of(self.torchrun.pid), *ranks}, grace_s=0.0)
        if self.raylet is not None and self.raylet.poll() is None:
            self.raylet.terminate()
        if self.supervisor is not None and self.supervisor.poll() is None:
            self._ask_supervisor_to_stop(self.supervisor)
        orderly = {ProcessId.of(p.pid) for p in (self.raylet, self.supervisor) if p is not None and p.poll() is None}
        deadline = time.monotonic() + self._timeouts.shutdown_s
        while any(is_alive(process) for process in orderly) and time.monotonic() < deadline:
            self.children |= descendants(os.getpid())
            time.sleep(0.1)
        left = sweep(self.children | descendants(os.getpid()), grace_s=TERMINATE_S)
        if left:
            logger.error("still alive after SIGKILL: %s", sorted(process.pid for process in left))

    def _ask_supervisor_to_stop(self, supervisor: subprocess.Popen[bytes]) -> None:
        """Write RUN_DIR/supervisor.stop; send SIGTERM instead if the directory is another run's or not writable."""
        if other_holder(self._launch.run_dir, self._holder) is not None:
            supervisor.terminate()
            return
        try:
            (self._launch.run_dir / SUPERVISOR_STOP).write_text(self._launch.launch_id)
        except OSError:
            supervisor.terminate()
