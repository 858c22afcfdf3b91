"""The agent of one node: starts the node's share of the job, watches it, and ends it.

`python -m megarl.cluster.nodes.launcher LAUNCH_FILE [INDEX]` runs on every node at the same time, started by srun, ssh
or a local shell; INDEX defaults to SLURM_PROCID. Everything that the node runs is a child of this process and ends with
it. Exit code 0: the run has ended and recorded how in RUN_DIR/exit.json. Exit code 1: something failed, here or on
another node, and RUN_DIR/launch/ID/failed.json names the node and the reason.

Once the pool is ready, the loss of a node with engines only does not end the job: the pool shrinks. The node's agent
restarts its raylet, and the pool grows again when that has joined. If the agent has ended too, the same command starts
it.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from megarl.cluster.nodes.node_files import NodeBoard, NodeFailure, NodeRecord, State, Watch
from megarl.cluster.nodes.processes import NodeProcesses
from megarl.cluster.nodes.spec import LaunchSpec
from megarl.cluster.pool.network import interface_of, network_environment, own_address
from megarl.cluster.pool.pool_process import REBUILDING, read_state
from megarl.cluster.pool.ray_head import ReservedPorts
from megarl.common.clocks import RateLimit
from megarl.common.errors import ConfigError
from megarl.common.process.processes import ProcessId
from megarl.common.rundir import run_files
from megarl.common.rundir.notices import write_notice
from megarl.common.rundir.run_lock import Holder, RunClaim, claim, other_holder
from megarl.common.trust.signed_store import NODE_ADDRESS_VARIABLE
from megarl.config.checks.secrets import user_environment
from megarl.config.derived.hardware import local_gpus

logger = logging.getLogger("megarl.cluster.nodes.launcher")


def can_lose(launch: LaunchSpec, index: int) -> bool:
    """Return whether the job continues without a node: only engines run there, and all engines were up once. Before
    that the plan does not fit, and after the end of the run its nodes must end properly.
    """
    record = run_files.read_exit(launch.run_dir)
    ended = record is not None and record.status != "failed"
    state = read_state(launch.run_dir) or {}
    ready = state.get("launch_id") == launch.launch_id and state.get("state") in {"ready", REBUILDING}
    return launch.topology.nodes[index].only_engines and ready and not ended


TICK_S = 0.5
BEAT_S = 2.0
COMPLAIN_S = 30.0  # between two log lines about the same trouble
SAME_REQUEST_S = 1.0


class NodeFailed(Exception):  # noqa: N818
    """This node cannot continue; the message is the reason why the job ends."""


class AskedAgain(NodeFailed):
    """The user asked a second time to end the job, which then ends at once."""


class DirectoryLost(Exception):  # noqa: N818
    """Another run has taken the run directory. Nothing may be written there."""

    @classmethod
    def to(cls, other: Holder, run_dir: Path) -> DirectoryLost:
        """Return the error of a run that has lost its claim to another one."""
        return cls(f"{run_dir} was taken by {other.describe()}, because this run was silent or --force was given")


class PeerFailed(Exception):  # noqa: N818
    """Another node has failed and recorded the reason."""


class NodeLauncher:
    """Runs the share of node `index` from its start to its end."""

    def __init__(self, launch: LaunchSpec, index: int) -> None:
        self.launch, self.config = launch, launch.config
        self.topology = launch.topology
        self.node = launch.topology.nodes[index]
        self.host = launch.hosts[index] if launch.hosts else platform.node()
        self.board = NodeBoard(Path(launch.directory))
        self._holder = Holder.here("megarl launch", ProcessId.own(), launch.launch_id)
        self._claim: RunClaim | None = None  # the first node's agent holds the run directory
        self.address = "127.0.0.1"
        self.endpoint = ""
        self._reserved: ReservedPorts | None = None
        self._beat = 0
        self._next_beat = 0.0
        self._signals, self._signalled_at = 0, 0.0
        self._stop_request: str | None = None  # to be written to RUN_DIR/stop
        self._ending = False  # from then on no signal may interrupt
        self._trouble_since: float | None = None  # when the file system began to fail
        self._complaints = RateLimit(COMPLAIN_S)
        self._processes = NodeProcesses(launch, self.node, self._holder)
        self._lost: set[int] = set()  # nodes without which the job continues
        self._ended_at: float | None = None
        self._pool_ended_at: float | None = None
        # The first node watches all others and they watch the first, which keeps reads of the shared file system few.
        watched = [n.index for n in self.topology.nodes if n.index != index] if index == 0 else [0]
        self._watch = Watch(self.board, watched, self.config.timeouts.node_s)

    def run(self) -> int:
        """Start, watch and end this node's share. Return the exit code that the module's docstring describes."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        try:
            self._start()
            while not self._tick_or_wait():
                time.sleep(TICK_S)
            self._finish()
        except Exception as error:
            self._ending = True
            try:
                self._record(error)
            except OSError as failure:
                logger.error("the failure could not be recorded in %s: %s", self.launch.run_dir, failure)
            self._processes.end_all()
            return 1
        return 0

    def _record(self, error: Exception) -> None:
        """Log why this node ends, and record it for the others unless they know it or continue. Raises OSError."""
        if isinstance(error, DirectoryLost | PeerFailed):
            logger.error("ending: %s", error)
        else:
            logger.error("node %d (%s) failed", self.node.index, self.host, exc_info=error)
        if isinstance(error, DirectoryLost):
            self.board.claim_failure(NodeFailure(self.host, str(error)))
        elif isinstance(error, AskedAgain) or not (
            isinstance(error, PeerFailed) or can_lose(self.launch, self.node.index)
        ):
            clear = isinstance(error, NodeFailed | ValueError)
            self._fail_job(self.host, str(error) if clear else f"{type(error).__name__}: {error}")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """On the first signal ask the run to save and end; on a second one end at once.

        One Ctrl-C reaches this process from the terminal and from the launch script: within SAME_REQUEST_S it is one.
        """
        name, now = signal.Signals(number).name, time.monotonic()
        if self._signals and now < self._signalled_at + SAME_REQUEST_S:
            return
        self._signals, self._signalled_at = self._signals + 1, now
        if self._ending:
            logger.info("%s while ending: everything is ended already", name)
            return
        if self._signals > 1:
            raise AskedAgain(
                f"received a second stop signal ({name}); the same command resumes from the newest checkpoint, if "
                "there is one"
            )
        if (other := other_holder(self.launch.run_dir, self._holder)) is not None:  # the request would stop that run
            raise DirectoryLost.to(other, self.launch.run_dir)
        self._stop_request = f"{name} on node {self.host}"
        with suppress(OSError):  # the next tick tries it again
            self._ask_run_to_stop()

    def _ask_run_to_stop(self) -> None:
        """Pass on to the ranks a stop signal that has not been passed on yet. Raises OSError."""
        if self._stop_request is not None:
            run_files.ask_to_stop(self.launch.run_dir, self._stop_request)
            self._stop_request = None

    def _start(self) -> None:
        have = len(local_gpus())
        if self.launch.cuda and have <= self.node.last_device:
            raise NodeFailed(f"has {have} GPUs, but the config uses device {self.node.last_device}")
        if self.node.index == 0:
            try:
                self._claim = claim(self.launch.run_dir, self._holder, self.config.timeouts.node_s)
            except ConfigError as error:
                raise DirectoryLost(str(error)) from error
        several = len(self.topology.nodes) > 1
        interface = self.config.launch.interface
        if several or interface is not None:
            self.address = own_address(self.launch.hosts, interface)
        os.environ.update(user_environment(self.config.launch.runtime_env))
        os.environ.update(
            network_environment(self.address, interface_of(self.address), several=several, chosen=interface is not None)
        )
        os.environ[NODE_ADDRESS_VARIABLE] = self.address
        logger.info("node %d (%s, %s): %s", self.node.index, self.host, self.address, self.node.role)
        if self.node.trainer_rank == 0:
            self._reserved = ReservedPorts(1)  # until this process ends: torchrun listens there some seconds later
            self.endpoint = f"{self.address}:{self._reserved.ports[0]}"
        self._post()
        if self.node.supervisor:
            self._processes.start_supervisor()
        else:
            self._processes.start_raylet()

    def _start_torchrun(self) -> None:
        """Start torchrun if this node has ranks, once the first trainer node has posted the rendezvous's address."""
        if self.node.trainer_rank is None or self._processes.torchrun is not None:
            return
        first = self.board.read(self.topology.trainer(0).index)
        if first is not None and first.endpoint:
            self._processes.start_torchrun(first.endpoint, self.address)

    def _tick_or_wait(self) -> bool:
        """Tick; return False while the file system has failed for less than `timeouts.node_s`.

        Raises NodeFailed once it has failed for longer.
        """
        try:
            done = self._tick()
        except OSError as error:
            self._trouble_since = self._trouble_since or time.monotonic()
            if self._complaints.allows():
                logger.warning("the run's file system fails, trying again: %s", error)
            if time.monotonic() > self._trouble_since + self.config.timeouts.node_s:
                bound = f"{self.config.timeouts.node_s:.0f} s (timeouts.node_s)"
                raise NodeFailed(f"its file system has failed for {bound}: {error}") from error
            return False
        self._trouble_since = None
        return done

    def _tick(self) -> bool:
        """Check every process and peer once. Return True when this node's share is done."""
        self._processes.look()
        self._post_if_due()
        self._ask_run_to_stop()
        if (failure := self.board.failure()) is not None:
            raise PeerFailed(f"node {failure.node} failed: {failure.reason}")
        self._start_torchrun()
        ending = self._run_has_ended()
        ranks_done = self._torchrun_done(ending)
        pool_done = self._supervisor_done(ending)
        self._check_raylet(ending)
        self._processes.kill_stopped_ranks()
        if ending:
            self._ended_at = self._ended_at or time.monotonic()
            self._check_end_in_time()
        else:
            self._check_peers()
        return ending and ranks_done and pool_done

    def _run_has_ended(self) -> bool:
        """Return whether the ranks have recorded the end of the run, after which processes are expected to end."""
        record = run_files.read_exit(self.launch.run_dir)
        return record is not None and record.status != "failed"

    def _torchrun_done(self, ending: bool) -> bool:
        """Return whether this node's ranks, if it has any, have ended. Raises NodeFailed if they failed."""
        if self.node.trainer_rank is None:
            return True
        torchrun = self._processes.torchrun
        if torchrun is None or torchrun.poll() is None:
            return False
        # After a SIGTERM torchrun's own code is not 0, even if all its ranks exited with 0.
        if torchrun.returncode != 0 and not ending:
            raise NodeFailed(self._why_ranks_failed(torchrun.returncode))
        return True

    def _why_ranks_failed(self, code: int) -> str:
        """Return a rank's message in RUN_DIR/error.txt, or torchrun's exit code."""
        message = self.launch.run_dir / "error.txt"
        if message.is_file():
            return " ".join(message.read_text().split()).removeprefix("megarl: ")
        logs = self.launch.run_dir / "logs"
        return f"a trainer rank was killed (torchrun ended with code {code}); see {logs}"

    def _supervisor_done(self, ending: bool) -> bool:
        """Return whether the supervisor has ended, on its node by its process, elsewhere by its state file.

        Raises NodeFailed if it ended before the run.
        """
        state = read_state(self.launch.run_dir) or {}
        ended = state.get("launch_id") == self.launch.launch_id and state.get("state") in {"stopped", "failed"}
        supervisor = self._processes.supervisor
        if supervisor is None:
            return ending and ended
        if supervisor.poll() is None:
            return False
        if ending:
            return True
        # If a failed rank asked it to stop, give that rank's node time to report the reason.
        self._pool_ended_at = self._pool_ended_at or time.monotonic()
        asked = ended and supervisor.returncode == 0
        if not asked or time.monotonic() > self._pool_ended_at + self.config.timeouts.node_s:
            reason = state.get("error") if ended else "its supervisor was killed"
            raise NodeFailed(f"the rollout pool ended: {reason}")
        return False

    def _check_raylet(self, ending: bool) -> None:
        """Raise NodeFailed if the raylet has ended; on a node that the run can lose, restart it after a while. Ray ends
        a raylet that its head has given up, for example after a network cut.
        """
        code = None if ending else self._processes.raylet_code()
        if code is None:
            return
        if not can_lose(self.launch, self.node.index):
            raise NodeFailed(f"Ray's raylet ended with code {code}")
        self._processes.rejoin(code)

    def _check_peers(self) -> None:
        """End the job, naming the node, if a watched node has not started or is silent for `timeouts.node_s`.

        A node with engines only is reported as lost, and as back at its next sign of life.
        """
        silent = f"{self.config.timeouts.node_s:.0f} s"
        lost = dict(self._watch.lost())
        for index in sorted(self._lost - lost.keys()):
            self._lost.discard(index)
            write_notice(self.launch.run_dir, f"node {self._host_of(index)} is back")
        for index, record in lost.items():
            name = record.host if record is not None else self._host_of(index)
            if record is not None and can_lose(self.launch, index):
                if index not in self._lost:
                    self._lost.add(index)
                    write_notice(self.launch.run_dir, f"node {name} is lost, silent for {silent}; the run continues")
                continue
            self._fail_job(name, f"not started within {silent}" if record is None else f"lost, silent for {silent}")

    def _check_end_in_time(self) -> None:
        """Raise NodeFailed if processes remain after twice the bound of a tear-down, counted from the run's end."""
        assert self._ended_at is not None
        bound = 2 * self.config.timeouts.shutdown_s
        if time.monotonic() > self._ended_at + bound:
            raise NodeFailed(f"still has processes {bound:.0f} s after the end of the run")

    def _host_of(self, index: int) -> str:
        return self.launch.hosts[index] if self.launch.hosts else f"{index}"

    def _post(self, done: bool = False) -> None:
        self._beat += 1
        self._next_beat = time.monotonic() + BEAT_S
        state: State = "done" if done else "running"
        self.board.post(NodeRecord(self.node.index, self.host, self.address, state, self._beat, self.endpoint))

    def _post_if_due(self) -> None:
        """Show other nodes and other starts that this one is alive. A disk that is full for a while ends nothing."""
        if time.monotonic() >= self._next_beat:
            try:
                self._post()
            except OSError as error:
                if self._complaints.allows():
                    logger.warning("this node's sign of life could not be written: %s", error)
            if self._claim is not None and (other := self._claim.renew()) is not None:
                raise DirectoryLost.to(other, self.launch.run_dir)

    def _fail_job(self, host: str, reason: str) -> None:
        """Record why the job ends, unless another node has recorded a failure first."""
        first = self.board.claim_failure(NodeFailure(host, reason))
        if other_holder(self.launch.run_dir, self._holder) is not None:
            return  # exit.json is that run's
        record = run_files.read_exit(self.launch.run_dir)
        if first and (record is None or record.status != "failed"):
            step = record.step if record is not None else 0
            run_files.write_exit(self.launch.run_dir, run_files.ExitRecord("failed", step, f"node {host}: {reason}"))

    def _finish(self) -> None:
        self._ending = True
        self._processes.end_all()
        with suppress(OSError):  # the others know the end of the run from exit.json
            self._post(done=True)
        logger.info("done")


def main() -> int:
    """Run the agent of the node from the command line; return its exit code."""
    launch = LaunchSpec.load(Path(sys.argv[1]))
    index = int(sys.argv[2] if len(sys.argv) > 2 else os.environ["SLURM_PROCID"])
    os.chdir(launch.cwd)
    logs = launch.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        filename=logs / f"node-{index}.log",
    )
    return NodeLauncher(launch, index).run()


if __name__ == "__main__":
    sys.exit(main())
