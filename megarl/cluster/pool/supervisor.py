"""The supervisor: owns the Ray head and the actors of one run, watches them, and ends them.

`python -m megarl.cluster.pool.supervisor SPEC` is started in a session of its own by
`megarl/cluster/pool/pool_process.py`, so that neither a killed rank nor a Ctrl-C ends the pool. It tears down the pool
when the torchrun agent (pid and start time) is gone, when RUN_DIR/supervisor.stop names this launch, when another
launch has replaced RUN_DIR/supervisor.json, on SIGTERM, and when the Ray head dies.

A guardian (`megarl/cluster/pool/guardian.py`) kills what is left after that, and this process if it is stuck.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from megarl.cluster.pool.actors import PoolActors, cause_of
from megarl.cluster.pool.network import one_node_environment
from megarl.cluster.pool.pool_process import REBUILDING, STATE_FILE, STOP_FILE, SupervisorSpec
from megarl.cluster.pool.ray_head import RayHead, access_environment, ray_environment, rollout_share
from megarl.cluster.pool.state import PoolState
from megarl.common.clocks import RateLimit
from megarl.common.errors import RolloutError
from megarl.common.process.memory_tuning import begin_start, end_start
from megarl.common.process.output import redirect_output
from megarl.common.process.processes import ProcessId, descendants, is_alive, sweep
from megarl.common.rundir.notices import write_notice
from megarl.common.rundir.private_directory import (
    make_private_directory,
    remove_private_directory,
    sweep_dead_directories,
    use_private_directory,
)
from megarl.common.trust.run_secret import run_token
from megarl.config.derived.pools import resolve_pools
from megarl.config.schema import Config
from megarl.rollout.engine.placement import ENGINE_RESOURCE, refuse_split_replica, visible_devices

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
WATCH_S = 0.5
MOST_REBUILDS, REBUILD_PERIOD_S = 3, 3600.0  # how many new controllers and queues may start within how long
COMPLAIN_S = 30.0  # between two log lines about the same trouble


class Supervisor:
    """Runs one pool from its start to its end; writes its state to RUN_DIR/supervisor.json.

    If the controller or a process of the queue dies, it restarts both for the live engines. It ends once the supervisor
    of another launch has written its state there.
    """

    def __init__(self, spec: SupervisorSpec, private: Path) -> None:
        """`private`: a private directory for the pool's sockets and temporary files, which the supervisor owns."""
        self.spec = spec
        self.config = Config.model_validate_json(spec.config_json)
        self.run_dir = Path(spec.run_dir)
        self.stop_reason: str | None = None
        self._stop = threading.Event()
        self._complaints = RateLimit(COMPLAIN_S)
        self._state = PoolState(spec, private, self._complaints, self.request_stop)
        self._private = private
        self._head: RayHead | None = None
        self._actors = PoolActors(spec, self.config, lambda: self.stop_reason)
        self._rebuilt_at: list[float] = []  # when controller and queue were started again (`time.monotonic`)
        self._heartbeats = 0
        self._ending_since: float | None = None
        # Half of the time that the launcher waits, so that an orderly and a forced tear-down both fit.
        self._orderly_s = self.config.timeouts.shutdown_s / 2

    def run(self) -> int:
        """Start the pool, watch it and tear it down. Return 0 if it was asked to stop, 1 if something failed."""
        self._state.publish()
        self._start_guardian()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        failure: BaseException | None = None
        try:
            self._start_ray()
            self._start_actors()
            self._state.publish(state="ready")
            end_start()
            logger.info("pool ready")
            self._keep_serving()
        except Exception as error:
            failure = error
            if not self._stop.is_set():
                logger.exception("the pool failed")
        self._tear_down(failure)
        return 0 if failure is None or self.stop_reason is not None else 1

    def _start_guardian(self) -> None:
        own = ProcessId.own()
        state_file = self.run_dir / STATE_FILE
        # By then an orderly and a forced tear-down would have ended.
        agent, patience_s = self.spec.agent, 1.6 * self._orderly_s
        numbers = (own.pid, own.start_time, agent.pid, agent.start_time, patience_s)
        arguments = (str(state_file), str(self._private), *map(str, numbers))
        command = [sys.executable, "-m", "megarl.cluster.pool.guardian", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._guardian = ProcessId.of(process.pid)

    def _descendants(self) -> set[ProcessId]:
        """Return all descendants except the guardian, which ends on its own after this process."""
        return descendants(os.getpid()) - {self._guardian}

    def _keep_serving(self) -> None:
        """Serve until asked to stop. If controller or queue fail, restart both as often as allowed, then raise
        RolloutError with the last reason.
        """
        while True:
            try:
                return self._serve()
            except RolloutError as error:
                if self._stop.is_set() or not self._may_rebuild(time.monotonic()):
                    raise
                self._rebuild(str(error))

    def _may_rebuild(self, now: float) -> bool:
        """Return whether controller and queue may restart: not too often in a short time."""
        return sum(now - each < REBUILD_PERIOD_S for each in self._rebuilt_at) < MOST_REBUILDS

    def _rebuild(self, reason: str) -> None:
        """Restart controller and queue; the trainer then reports its progress to the new controller.

        Raises RolloutError if they do not start.
        """
        self._rebuilt_at.append(time.monotonic())
        count = len(self._rebuilt_at)
        self._state.publish(state=REBUILDING, rebuilds=count, rebuilt_because=reason)
        write_notice(self.run_dir, f"{reason}; restarting the rollout controller and the queue")
        partition = f"{self.spec.partition}.{count}"
        self._actors.replace_controller(partition)
        self._state.publish(state="ready", partition=partition)
        logger.info("the pool has a new controller and a new queue (%d so far)", count)

    def _serve(self) -> None:
        """Call the controller at intervals until asked to stop, and count the answers in the state.

        Raises RolloutError if the controller, Ray or a process of the queue does not answer, or if the controller
        cannot be reached for `timeouts.rpc_s`.
        """
        import ray

        heartbeat, bound = self._actors.controller.heartbeat, self.config.timeouts.rpc_s
        asked_at: float | None = None  # since when there is no answer
        next_beat = time.monotonic() + HEARTBEAT_S
        while not self._stop.wait(WATCH_S):
            if self._actors.gateway is not None:
                self._actors.gateway.look()
            if time.monotonic() < next_beat:
                continue
            next_beat = time.monotonic() + HEARTBEAT_S
            asked_at = asked_at or time.monotonic()
            try:
                # The last look gets some time too, so that a cut is reported as unreachable, not as late.
                ray.get(heartbeat.remote(), timeout=max(HEARTBEAT_S, asked_at + bound - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise RolloutError(cause_of(error)) from error
            except ray.exceptions.ActorUnavailableError as error:  # the network may be cut for a short time
                waited_s = time.monotonic() - asked_at
                if waited_s >= bound:
                    raise RolloutError(
                        f"the supervisor could not reach the rollout controller for {waited_s:.0f} s "
                        f"(timeouts.rpc_s): {cause_of(error)}"
                    ) from error
                if self._complaints.allows():
                    logger.warning("the rollout controller cannot be reached; trying again: %s", cause_of(error))
                continue
            except Exception as error:
                raise RolloutError(f"the rollout controller does not answer: {cause_of(error)}") from error
            asked_at = None
            self._heartbeats += 1
            self._state.publish(heartbeats=self._heartbeats)

    def request_stop(self, reason: str) -> None:
        """Make `run` tear down the pool and end. The first reason is kept."""
        if not self._stop.is_set():
            self.stop_reason = reason
            self._ending_since = self._ending_since or time.monotonic()
            logger.info("stopping: %s", reason)
            self._stop.set()

    def _force_exit(self) -> None:
        """End everything from the watch thread, because the main thread is stuck in a library call."""
        logger.error("the orderly tear-down took more than %.0f s: killing what is left", self._orderly_s)
        try:
            left = sweep(self._record_descendants(), grace_s=0.0)
            self._state.publish(
                state="stopped" if self.stop_reason else "failed", error=self.stop_reason or "tear-down hung"
            )
            logger.error("still alive: %s", sorted(process.pid for process in left))
            logging.shutdown()
        finally:
            os._exit(1)

    def _record_descendants(self) -> set[ProcessId]:
        """Add the present descendants to those seen before that live, orphans included; return a copy of these."""
        return self._state.record_children(self._descendants())

    def _watch(self) -> None:
        """Check twice a second for the life of this process: no error may end this thread."""
        recorded: set[ProcessId] = set()
        while True:
            try:
                recorded = self._watch_once(recorded)
            except Exception:
                if self._complaints.allows():
                    logger.exception("the watch of the supervisor failed; it continues")
            time.sleep(WATCH_S)

    def _watch_once(self, recorded: set[ProcessId]) -> set[ProcessId]:
        """Check agent, deadline and stop file; write new descendants to the state. Return the recorded descendants.

        What needs no disk comes first.
        """
        if not is_alive(self.spec.agent):
            self.request_stop(f"the launcher (pid {self.spec.agent.pid}) is gone")
        if self._ending_since is not None and time.monotonic() > self._ending_since + self._orderly_s:
            self._force_exit()
        children = self._record_descendants()
        if self._asked_to_stop():
            self.request_stop("asked to")
        if (children != recorded or not self._state.published) and not self._stop.is_set():
            self._state.publish()
        return children

    def _asked_to_stop(self) -> bool:
        """Return whether RUN_DIR/supervisor.stop names this launch."""
        try:
            return (self.run_dir / STOP_FILE).read_text() in {"", self.spec.launch_id}
        except FileNotFoundError:
            return False
        except OSError as error:
            if self._complaints.allows():
                logger.warning("cannot check now whether the pool is asked to stop: %s", error)
            return False

    def _start_ray(self) -> None:
        config, rollout = self.config, self.config.rollout
        pool = resolve_pools(config).rollout
        if self.spec.cuda:
            refuse_split_replica(rollout.tensor_parallel, len(pool.devices))
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(pool.devices)
        if config.ray.address is None:
            os.environ.update(access_environment(self.run_dir, create=True))
        os.environ.update(one_node_environment(config.ray))
        run_token()  # raises now, not after the engines' start, if the queue cannot be locked
        if config.ray.address is None:
            share = rollout_share(config, cuda=self.spec.cuda)
            self._head = RayHead(
                share, self.spec.namespace, self.run_dir / "logs", config.timeouts.ray_start_s, self._private
            )
            self._head.start()
            address = self._head.address
        else:
            import ray

            address = config.ray.address
            ray.init(address=address, namespace=self.spec.namespace, log_to_driver=False, configure_logging=False)
        # After ray.init, which installs a SIGTERM handler of its own.
        signal.signal(signal.SIGTERM, lambda *_: self.request_stop("SIGTERM"))
        self._state.publish(address=address)
        logger.info("Ray at %s", address)
        if self._head is not None:
            self._await_nodes(pool.nodes, config.timeouts.ray_start_s)

    def _await_nodes(self, count: int, timeout_s: float) -> None:
        """Wait until all rollout nodes have joined: Ray places engines and storage on the nodes that it knows.

        Raises RolloutError when `timeout_s` has passed or a stop is requested.
        """
        import ray

        deadline = time.monotonic() + timeout_s
        while True:
            alive = [node for node in ray.nodes() if node["Alive"] and ENGINE_RESOURCE in node["Resources"]]
            if len(alive) >= count:
                return
            if self._stop.is_set():
                raise RolloutError(f"stopped while starting: {self.stop_reason}")
            if time.monotonic() > deadline:
                here = ", ".join(sorted(node["NodeManagerAddress"] for node in alive))
                raise RolloutError(
                    f"the supervisor waited {timeout_s:.0f} s for {count} rollout nodes to join Ray; "
                    f"{len(alive)} did: {here}"
                )
            time.sleep(0.2)

    def _start_actors(self) -> None:
        """Start the actors and report the gateway's address. Raises RolloutError naming the first that failed."""
        self._actors.start()
        if self._actors.gateway is not None:
            self._state.publish(gateway=self._actors.gateway.url)

    def _tear_down(self, failure: BaseException | None) -> None:
        """End the engines first (bounded), then Ray, then every process that is left, by pid and start time."""
        started = time.monotonic()
        self._ending_since = self._ending_since or started
        state, error = "stopped", self.stop_reason
        if failure is not None and error is None:
            state, error = "failed", cause_of(failure)
        # Published before the clean-up: the launcher may wait for it, and ranks that wait for an actor of the pool
        # must find the reason when the actor ends.
        self._state.publish(state="stopping" if state == "stopped" else state, error=error)
        self._record_descendants()
        self._actors.close(min(5.0, self.config.timeouts.shutdown_s / 3))
        left = sweep(self._record_descendants(), grace_s=1.0)
        if self._head is not None:
            self._head.stop()
        remove_private_directory(self._private)
        if left:
            logger.error("still alive after SIGKILL: %s", sorted(process.pid for process in left))
        self._state.publish(state=state, error=error)
        logger.info("torn down in %.1f s", time.monotonic() - started)


def main() -> int:
    """Run the supervisor of the spec file that the first argument names; its end is the end of the process."""
    begin_start()
    spec = SupervisorSpec.load(Path(sys.argv[1]))
    os.chdir(spec.cwd)
    os.environ.update(
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
        PYTHONPATH=os.pathsep.join(filter(None, (spec.cwd, os.environ.get("PYTHONPATH")))),
        TQ_NUM_THREADS="1",
        TQ_LOGGING_LEVEL="ERROR",
        **ray_environment(),
    )
    redirect_output(Path(spec.run_dir) / "logs" / "supervisor.log")
    logger.info("supervisor of %s: %s", spec.run_dir, json.dumps({"attempt": spec.attempt, "launch": spec.launch_id}))
    code = 1
    try:
        sweep_dead_directories()
        private = make_private_directory()
        use_private_directory(private)
        code = Supervisor(spec, private).run()
        logging.shutdown()
    finally:
        # Not sys.exit: a library's non-daemon thread or exit hook could keep this process alive.
        os._exit(code)


if __name__ == "__main__":
    main()
