"""The supervisor: owns the Ray head, the replicas, the controller and the queue of one run, and ends them.

`python -m megarl.cluster.supervisor SPEC` is started in a session of its own by `megarl/cluster/handle.py`, so that
neither a killed rank nor a Ctrl-C ends the pool. It tears down the pool when the torchrun agent (pid and start time)
is gone, when RUN_DIR/supervisor.stop names this launch, when another launch has replaced RUN_DIR/supervisor.json, on
SIGTERM, and when the Ray head dies.

Its actors are named but not `lifetime="detached"`: this process owns them, so that even its SIGKILL ends them.
A guardian (`megarl/cluster/guardian.py`) kills what is left after that, and this process if it is stuck.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cluster.door_keeper import DoorKeeper
from megarl.cluster.handle import REBUILDING, STATE_FILE, STOP_FILE, SupervisorSpec, read_state, write_state
from megarl.cluster.nodes.network import one_node_environment
from megarl.cluster.pool_commands import PoolCommands
from megarl.cluster.ray_head import RayHead, access_environment, ray_environment, rollout_share
from megarl.common.errors import RolloutError
from megarl.common.notices import write_notice
from megarl.common.output import redirect_output
from megarl.common.private_directory import (
    make_private_directory,
    remove_private_directory,
    sweep_dead_directories,
    use_private_directory,
)
from megarl.common.processes import ProcessId, descendants, is_alive, still_alive, sweep
from megarl.common.rate_limit import RateLimit
from megarl.common.run_token import run_token
from megarl.config.checks import max_sequence_tokens
from megarl.config.pools import resolve_pools
from megarl.config.schema import Config
from megarl.config.teachers import engine_teachers
from megarl.door.door_actor import DoorSpec
from megarl.models.read_config import load_info
from megarl.rollout.devices import refuse_split_replica, visible_devices
from megarl.rollout.placement import ENGINE_RESOURCE, HEAD_RESOURCE, HEAD_SHARE, ROLLOUT_RESOURCE
from megarl.rollout.replica import ReplicaSpec, create_replica
from megarl.rollout.teachers.teacher_engine import create_teacher

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

CONTROLLER = "controller"
HEARTBEAT_S = 2.0
WATCH_S = 0.5
MOST_REBUILDS, REBUILD_PERIOD_S = 3, 3600.0  # new controllers and queues that are started in so long a time
COMPLAIN_S = 30.0  # between two log lines about the same trouble


class Supervisor:
    """Runs one pool from its start to its end; writes its state to RUN_DIR/supervisor.json.

    If the controller or a process of the queue dies, it starts both anew, for the engines that live.

    It leaves the file alone, and ends, once the supervisor of another launch has written there: that of a run that has
    taken the directory.
    """

    def __init__(self, spec: SupervisorSpec, private: Path) -> None:
        """`private`: a private directory for the pool's sockets and temporary files, which the supervisor owns."""
        self.spec = spec
        self.config = Config.model_validate_json(spec.config_json)
        self.run_dir = Path(spec.run_dir)
        self.stop_reason: str | None = None
        self._stop = threading.Event()
        self._children: set[ProcessId] = set()
        self._lock = threading.Lock()
        self._has_written = False
        self._replaced_by: str | None = None  # the launch that has taken the state file
        self._published = True  # False after a failure to write the state, until a later attempt succeeds
        self._complaints = RateLimit(COMPLAIN_S)
        self._state: dict[str, Any] = {
            "state": "starting",
            "error": None,
            "address": "",
            "namespace": spec.namespace,
            "partition": spec.partition,
            "rebuilds": 0,
            "attempt": spec.attempt,
            "launch_id": spec.launch_id,
            "process": asdict(ProcessId.own()),
            "host": platform.node(),
            "agent": asdict(spec.agent),
        }
        self._private = private
        self._state["private_directory"] = str(private)
        self._head: RayHead | None = None
        self._actors: list[ActorHandle] = []  # the controller last
        self._door: DoorKeeper | None = None  # if the run has one
        self._commands = PoolCommands(self.run_dir, spec.launch_id)
        self._rebuilt_at: list[float] = []  # when controller and queue were started anew (`time.monotonic`)
        self._heartbeats = 0
        self._ending_since: float | None = None
        # Half of the time that the launcher waits, so that an orderly and a forced tear-down both fit.
        self._orderly_s = self.config.timeouts.shutdown_s / 2

    def run(self) -> int:
        """Start the pool, watch it and tear it down. Return 0 if it was asked to stop, 1 if something failed."""
        self._publish()
        self._start_guardian()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()
        failure: BaseException | None = None
        try:
            self._start_ray()
            self._start_actors()
            self._publish(state="ready")
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
        # By then an orderly tear-down and a forced one would have ended.
        agent, patience_s = self.spec.agent, 1.6 * self._orderly_s
        numbers = (own.pid, own.start_time, agent.pid, agent.start_time, patience_s)
        arguments = (str(state_file), str(self._private), *map(str, numbers))
        command = [sys.executable, "-m", "megarl.cluster.guardian", *arguments]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self._guardian = ProcessId.of(process.pid)

    def _descendants(self) -> set[ProcessId]:
        """Return all descendants except the guardian, which ends by itself after this process."""
        return descendants(os.getpid()) - {self._guardian}

    def _keep_serving(self) -> None:
        """Serve until asked to stop. If controller or queue fail, start both anew, as often as is allowed.

        Raises RolloutError with the last reason otherwise.
        """
        while True:
            try:
                return self._serve()
            except RolloutError as error:
                if self._stop.is_set() or not self._may_rebuild(time.monotonic()):
                    raise
                self._rebuild(str(error))

    def _may_rebuild(self, now: float) -> bool:
        """Tell whether controller and queue may be started anew: not too often in a short time."""
        return sum(now - each < REBUILD_PERIOD_S for each in self._rebuilt_at) < MOST_REBUILDS

    def _rebuild(self, reason: str) -> None:
        """Kill the controller, and with it the queue that it owns, and start both anew.

        The trainer then tells the new controller how far it has come. Raises RolloutError if they do not start.
        """
        import ray

        self._rebuilt_at.append(time.monotonic())
        count, timeouts = len(self._rebuilt_at), self.config.timeouts
        self._publish(state=REBUILDING, rebuilds=count, rebuilt_because=reason)
        write_notice(self.run_dir, f"{reason}; the rollout controller and the queue are started anew")
        ray.kill(self._actors.pop())
        partition = f"{self.spec.partition}.{count}"
        controller = self._create_controller(partition, timeouts.rpc_s, replaces=True)
        self._actors.append(controller)
        self._await_actors({controller.start.remote(): "the new rollout controller"}, timeouts.engine_start_s)
        self._publish(state="ready", partition=partition)
        logger.info("the pool has a new controller and a new queue (%d so far)", count)

    def _serve(self) -> None:
        """Call the controller at intervals until asked to stop, and count the answers in the state.

        Commands of `megarl pool` are read meanwhile. Raises RolloutError if the controller, Ray or a process of the
        queue does not answer, and if the controller cannot be reached for `timeouts.rpc_s`.
        """
        import ray

        heartbeat, bound = self._actors[-1].heartbeat, self.config.timeouts.rpc_s
        asked_at: float | None = None  # since when there is no answer
        next_beat = time.monotonic() + HEARTBEAT_S
        while not self._stop.wait(WATCH_S):
            self._commands.look(self._actors[-1])
            if self._door is not None:
                self._door.look()
            if time.monotonic() < next_beat:
                continue
            next_beat = time.monotonic() + HEARTBEAT_S
            asked_at = asked_at or time.monotonic()
            try:
                # The last look gets some time as well: that it could not be reached, and not that it was late, is the
                # reason of a cut.
                ray.get(heartbeat.remote(), timeout=max(HEARTBEAT_S, asked_at + bound - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise RolloutError(_cause(error)) from error
            except ray.exceptions.ActorUnavailableError as error:  # the network may be cut for a short time
                waited_s = time.monotonic() - asked_at
                if waited_s >= bound:
                    raise RolloutError(
                        f"the supervisor could not reach the rollout controller for {waited_s:.0f} s "
                        f"(timeouts.rpc_s): {_cause(error)}"
                    ) from error
                if self._complaints.allows():
                    logger.warning("the rollout controller cannot be reached and is asked again: %s", _cause(error))
                continue
            except Exception as error:
                raise RolloutError(f"the rollout controller does not answer: {_cause(error)}") from error
            asked_at = None
            self._heartbeats += 1
            self._publish(heartbeats=self._heartbeats)

    def request_stop(self, reason: str) -> None:
        """Make `run` tear down the pool and end. The first reason is kept."""
        if not self._stop.is_set():
            self.stop_reason = reason
            self._ending_since = self._ending_since or time.monotonic()
            logger.info("stopping: %s", reason)
            self._stop.set()

    def _force_exit(self) -> None:
        """End everything from the watch thread, because the main thread is stuck in a library's call."""
        logger.error("the orderly tear-down took more than %.0f s: killing what is left", self._orderly_s)
        try:
            left = sweep(self._record_descendants(), grace_s=0.0)
            self._publish(state="stopped" if self.stop_reason else "failed", error=self.stop_reason or "tear-down hung")
            logger.error("still alive: %s", sorted(process.pid for process in left))
            logging.shutdown()
        finally:
            os._exit(1)

    def _publish(self, **changes: object) -> None:
        """Write the state, with `changes`, to its file. If the disk refuses it, the watch tries again.

        The first time it replaces the state of an earlier launch. If another launch has replaced this one's since then,
        nothing is written any more, and this pool is asked to end.
        """
        with self._lock:
            self._state.update(changes)
            self._state["children"] = [asdict(child) for child in still_alive(self._children)]
            try:
                if not self._is_replaced():
                    write_state(self.run_dir, self._state)
                    self._has_written = True
                self._published = True
            except OSError as error:
                self._published = False
                if self._complaints.allows():
                    logger.error("the state could not be written, and will be tried again: %s", error)

    def _is_replaced(self) -> bool:
        """Tell whether the state file is another launch's by now; if so, ask this pool to end. Raises OSError."""
        if self._has_written and self._replaced_by is None:
            launch = (read_state(self.run_dir) or {}).get("launch_id", self.spec.launch_id)
            if launch != self.spec.launch_id:
                self._replaced_by = launch
                self.request_stop(f"another launch ({launch}) has begun in {self.run_dir}")
        return self._replaced_by is not None

    def _record_descendants(self) -> set[ProcessId]:
        """Add the present descendants to those seen before that live, orphans included; return a copy of these."""
        present = self._descendants()
        with self._lock:
            self._children = still_alive(self._children | present)
            return set(self._children)

    def _watch(self) -> None:
        """Check twice a second, for the life of this process: no error, of whatever kind, may end this thread."""
        recorded: set[ProcessId] = set()
        while True:
            try:
                recorded = self._watch_once(recorded)
            except Exception:
                if self._complaints.allows():
                    logger.exception("the watch of the supervisor failed, and goes on")
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
        if (children != recorded or not self._published) and not self._stop.is_set():
            self._publish()
        return children

    def _asked_to_stop(self) -> bool:
        """Tell whether RUN_DIR/supervisor.stop names this launch."""
        try:
            return (self.run_dir / STOP_FILE).read_text() in {"", self.spec.launch_id}
        except FileNotFoundError:
            return False
        except OSError as error:
            if self._complaints.allows():
                logger.warning("it is not known now whether the pool is asked to stop: %s", error)
            return False

    def _start_ray(self) -> None:
        config, rollout = self.config, self.config.rollout
        pool = resolve_pools(config).rollout
        if self.spec.cuda:
            refuse_split_replica(rollout.tensor_parallel, len(pool.devices))
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(pool.devices)
        if config.ray.address is None:
            os.environ.update(access_environment(self.run_dir, create=True))
        os.environ.update(one_node_environment(config))
        run_token()  # raises now, not after the engines' start, if the queue could not be locked
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
        self._publish(address=address)
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
        """Start the replicas and the controller (which starts the queue) at once.

        Raises RolloutError naming the first that failed.
        """
        spec, config = self.spec, self.config
        replica_spec = self._replica_spec()
        pending: dict[ObjectRef, str] = {}
        replicas = [create_replica(replica_spec, index) for index in range(config.rollout.replicas)]
        for index, replica in enumerate(replicas):
            pending[replica.start.remote()] = f"engine replica {index}"
        teachers = self._start_teachers(replica_spec, pending)
        controller = self._create_controller(spec.partition, config.timeouts.rpc_s)
        self._actors = [*replicas, *teachers, controller]
        pending[controller.start.remote()] = "the rollout controller"
        opening = self._open_door(replica_spec)
        if opening is not None:
            pending[opening] = "the door"
        answers = self._await_actors(pending, config.timeouts.engine_start_s)
        if self._door is not None:
            self._door.opened(answers["the door"])
            self._publish(door=self._door.url)
        self._commands.look(controller)  # makes their directory, before the pool is ready for them

    def _start_teachers(self, pool: ReplicaSpec, pending: dict[ObjectRef, str]) -> list[ActorHandle]:
        """Create the engines of all teachers; add the references of their starts to `pending`."""
        created = []
        for teacher in engine_teachers(self.config):
            for number in range(teacher.replicas):
                created.append(create_teacher(pool, teacher.name, number))
                pending[created[-1].start.remote()] = f"engine {number} of teacher {teacher.name}"
        return created

    def _open_door(self, pool: ReplicaSpec) -> ObjectRef | None:
        """Create the door, if the run has one; return the reference of its start."""
        settings = self.config.door
        if not settings.enabled:
            return None
        self._door = DoorKeeper(
            DoorSpec(pool, CONTROLLER, settings.port, self.spec.door_token_file),
            own_head=self._head is not None,
            bound_s=self.config.timeouts.rpc_s,
            start_s=self.config.timeouts.engine_start_s,
            say=lambda text: write_notice(self.run_dir, text),
        )
        return self._door.open()

    def _replica_spec(self) -> ReplicaSpec:
        """Return what replicas and controller are made from."""
        spec, config = self.spec, self.config
        return ReplicaSpec(
            config_json=spec.config_json,
            run_dir=spec.run_dir,
            namespace=spec.namespace,
            cuda=spec.cuda,
            max_model_len=max_sequence_tokens(config, load_info(config.model.path)),
            supervisor=ProcessId.own() if self._head is not None else None,
            host=platform.node(),
        )

    def _create_controller(self, partition: str, timeout_s: float, *, replaces: bool = False) -> ActorHandle:
        """Create the controller's actor, not started. `replaces`: another one has had its name until now.

        Raises RolloutError if the name is not free within `timeout_s`.
        """
        import ray

        from megarl.rollout.controller import RolloutController
        from megarl.rollout.serving_controller import ServingController

        spec, deadline = self.spec, time.monotonic() + timeout_s
        head = {HEAD_RESOURCE: HEAD_SHARE} if self._head is not None else {}
        options = {"resources": {ROLLOUT_RESOURCE: 1, **head}, "num_cpus": 1, "max_concurrency": 1000}
        kind = ServingController if self.spec.serves else RolloutController
        named = ray.remote(kind).options(name=CONTROLLER, namespace=spec.namespace, **options)
        while True:
            try:
                return named.remote(self._replica_spec(), partition, cwd=spec.cwd, replaces=replaces)
            except ValueError:  # the name becomes free only when Ray has noticed the death of the old actor
                if not replaces or self._stop.is_set() or time.monotonic() > deadline:
                    waited = f"the supervisor waited {timeout_s:.0f} s for the end of the old rollout controller"
                    raise RolloutError(self.stop_reason or waited) from None
                time.sleep(0.1)

    def _await_actors(self, pending: dict[ObjectRef, str], timeout_s: float) -> dict[str, Any]:
        """Wait for every start call in `pending` (reference -> name of the part); return the answers by name.

        Raises RolloutError.
        """
        import ray

        answers: dict[str, Any] = {}
        deadline = time.monotonic() + timeout_s
        while pending:
            if self._stop.is_set():
                raise RolloutError(f"stopped while starting: {self.stop_reason}")
            if time.monotonic() > deadline:
                waited = ", ".join(pending.values())
                raise RolloutError(f"the supervisor waited {timeout_s:.0f} s for {waited}; see {self.run_dir / 'logs'}")
            done, _ = ray.wait(list(pending), timeout=0.2)
            for reference in done:
                name = pending.pop(reference)
                try:
                    answers[name] = ray.get(reference)
                except Exception as error:
                    raise RolloutError(f"{name}: {_cause(error)}; see {self.run_dir / 'logs'}") from error
                logger.info("%s is up: %s", name, answers[name])
        return answers

    def _tear_down(self, failure: BaseException | None) -> None:
        """End the engines first (bounded), then Ray, then every process that is left, by pid and start time."""
        started = time.monotonic()
        self._ending_since = self._ending_since or started
        state, error = "stopped", self.stop_reason
        if failure is not None and error is None:
            state, error = "failed", _cause(failure)
        # Published before the clean-up: the launcher may wait for it, and ranks that wait for an actor of the pool
        # must find the reason when the actor ends.
        self._publish(state="stopping" if state == "stopped" else state, error=error)
        self._record_descendants()
        self._close_actors(min(5.0, self.config.timeouts.shutdown_s / 3))
        left = sweep(self._record_descendants(), grace_s=1.0)
        if self._head is not None:
            self._head.stop()
        remove_private_directory(self._private)
        if left:
            logger.error("still alive after SIGKILL: %s", sorted(process.pid for process in left))
        self._publish(state=state, error=error)
        logger.info("torn down in %.1f s", time.monotonic() - started)

    def _close_actors(self, timeout_s: float) -> None:
        """Shut the actors down, kill them after `timeout_s` at the latest, and disconnect from Ray."""
        import ray

        if not ray.is_initialized():
            return
        try:
            actors = [*(self._door.close() if self._door is not None else ()), *self._actors]
            ray.wait([a.shutdown.remote() for a in actors], num_returns=len(actors) or 1, timeout=timeout_s)
            for actor in actors:
                ray.kill(actor)
        except Exception as error:
            logger.warning("closing the actors: %s", error)
        ray.shutdown()


def _cause(error: BaseException) -> str:
    """Return one line with what an actor raised, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    inner = cause if isinstance(cause, BaseException) else error
    lines = [line for line in str(inner).strip().splitlines() if line.strip()]
    text = lines[-1] if lines and type(inner).__name__.startswith("RayTask") else (lines[0] if lines else "")
    return text or type(inner).__name__


def main() -> int:
    """Run the supervisor of the spec file that the first argument names; its end is the end of the process."""
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
