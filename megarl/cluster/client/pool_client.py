"""The trainer's side of the pool: synchronous calls with bounded waits.

Rank 0 makes the calls; the first ranks of the other data-parallel replicas only connect to Ray.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from megarl.cluster.client.connection import ConnectionCut, call_once, connect_ray, own_sigterm_handler
from megarl.cluster.pool.actors import CONTROLLER
from megarl.cluster.pool.pool_process import NOTICED_S, SupervisorHandle, await_rebuilt, stop_supervisor, wait_ready
from megarl.common.errors import EngineMayRun, PartsLost, PoolEnded, ReplicaFailed, RolloutError
from megarl.config.schema import Config
from megarl.config.schema.job import TimeoutsConfig
from megarl.evaluation.harness import SetReport
from megarl.rollout.admission.counters import Counters
from megarl.rollout.engine.placement import HeldDevices
from megarl.rollout.engine.replica_start import replica_name
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.failover import CommitAnswer, TrainerRecord
from megarl.rollout.orchestrator.step_batches import BatchReady, PublicationNeeded
from megarl.rollout.transport.rpc import as_rollout_error

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.exceptions import RayTaskError

    from megarl.rollout.orchestrator.step_batches import StepEnds

logger = logging.getLogger(__name__)

# Extra time for a call that the controller itself bounds, so that the controller's message comes first.
CALL_MARGIN_S = 15.0


class _Stopped(Exception):  # noqa: N818
    """The wait for an evaluation was given up."""


@dataclass(frozen=True)
class _Connection:
    handle: SupervisorHandle
    controller: ActorHandle


class PoolClient:
    """Offers the controller's methods as blocking calls. Each ends within its bound from `timeouts`.

    If the controller or its queue dies after `begin`, a call waits until the supervisor has started new ones. It
    reports the trainer's progress to the new controller and is sent again. Any thread may call.
    """

    def __init__(
        self, handle: SupervisorHandle, timeouts: TimeoutsConfig, sync_repeats: int, controller: ActorHandle
    ) -> None:
        """`sync_repeats`: how often a weight sync that fails is repeated."""
        self.timeouts, self._sync_repeats = timeouts, sync_repeats
        self._connection = _Connection(handle, controller)
        self._record = TrainerRecord()
        self._syncing: int | None = None  # the thread that publishes weights
        self._changed = threading.Condition()  # guards what is above

    @property
    def handle(self) -> SupervisorHandle:
        """The pool's handle, with its present queue."""
        return self._connection.handle

    @classmethod
    def connect(
        cls, handle: SupervisorHandle, config: Config, report: Callable[[str], object] = lambda text: None
    ) -> PoolClient:
        """Wait until the pool is ready (engines started), and connect. `report` gets a line now and then.

        Raises SupervisorFailed naming the part that did not start.
        """
        handle = wait_ready(handle, config.timeouts.engine_start_s + config.timeouts.ray_start_s, report)
        connect_ray(handle, config.timeouts.ray_start_s)
        import ray

        return cls(
            handle, config.timeouts, config.weight_sync.restarts, ray.get_actor(CONTROLLER, namespace=handle.namespace)
        )

    def call(self, method: str, *args: object, timeout_s: float, **kwargs: object) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call one method of the controller and wait for its result, whose type is the method's.

        Raises RolloutError with the controller's own cause, after `timeout_s` without an answer, and after a network
        cut of `timeouts.rpc_s`.
        """
        return self._call(method, args, kwargs, timeout_s)[0]

    def _call(
        self, method: str, args: Sequence[object], kwargs: dict[str, object], timeout_s: float,
        check: Callable[[], None] = lambda: None, note: Callable[[Any], None] = lambda answer: None,
    ) -> tuple[Any, int]:  # fmt: skip
        """Call as `call`; return the answer, and how often controller and queue had been restarted by then.

        An exception of `check` ends the wait too. `note` records the answer of the present controller.
        """
        while True:
            connection = self._connection
            try:
                answer = self._send(connection, method, args, kwargs, timeout_s, check)
            except PartsLost as lost:
                if self._record.now is None:
                    raise RolloutError(f"{lost}; see {self.handle.run_dir}/logs/controller.log") from lost
                self._recover(connection, lost)
                continue
            with self._changed:
                # Otherwise the answer is from a controller that has since died, and the new one does not know it.
                if self._connection is connection:
                    note(answer)
                    return answer, connection.handle.rebuilds

    def _send(
        self, connection: _Connection, method: str, args: Sequence[object], kwargs: dict[str, object],
        timeout_s: float, check: Callable[[], None],
    ) -> Any:  # noqa: ANN401  # as `call`  # fmt: skip
        """Call a method of one controller. Raises PartsLost if it has died, and otherwise as `call`."""
        import ray

        handle = connection.handle

        def look() -> None:
            handle.check_parts()
            check()

        try:
            return call_once(
                connection.controller, method, args, kwargs, timeout_s=timeout_s,
                reach_s=self.timeouts.rpc_s, check=look,
            )  # fmt: skip
        except ConnectionCut as error:
            raise ConnectionCut(
                f"trainer rank 0 could not reach the rollout controller for {error.seconds:.0f} s, in which it asked "
                f"it to {method}: is the network between the trainer and {handle.host} cut? {error}",
                error.seconds,
            ) from error
        except ray.exceptions.GetTimeoutError:
            waited = f"trainer rank 0 waited {timeout_s:.0f} s for the rollout controller to {method}"
            if self._record.now is not None and handle.has_lost_parts(NOTICED_S):  # it hangs
                raise PartsLost(waited) from None
            raise RolloutError(waited) from None
        except ray.exceptions.RayActorError as error:
            handle.check()
            raise PartsLost("the rollout controller died") from error
        except ray.exceptions.RayTaskError as error:
            raise _own_error(error) from error

    def _recover(self, lost: _Connection, reason: PartsLost) -> None:
        """Connect to the new controller and report the trainer's progress, unless another thread has done it.

        A thread that does not publish first waits for the end of a publication: engines must not drop their requests in
        the middle of a weight sync. Raises RolloutError if there is no new controller in time.
        """
        import ray

        timeouts, own = self.timeouts, threading.get_ident()
        with self._changed:
            bound = self._most_sync_s()
            if not self._changed.wait_for(
                lambda: self._connection is not lost or self._syncing in (None, own), timeout=bound
            ):
                raise RolloutError(f"{reason}; the running weight sync did not end within {bound:.0f} s")
            if self._connection is not lost:
                return
            logger.warning("%s; waiting for new ones", reason)
            handle = lost.handle
            while True:
                # For its detection, its end and its restart.
                handle = await_rebuilt(handle, 3 * timeouts.rpc_s + timeouts.engine_start_s)
                new = _Connection(handle, ray.get_actor(CONTROLLER, namespace=handle.namespace))
                try:
                    self._send(new, "take_over", (self._record.now,), {}, 3 * timeouts.rpc_s, lambda: None)
                    break
                except PartsLost as error:
                    logger.warning("%s once more", error)
            self._record.lost()
            self._connection = new
            self._changed.notify_all()

    def _most_sync_s(self) -> float:
        """Return the bound of all attempts at a publication, including its calls to the controller."""
        timeouts, restarts = self.timeouts, self._sync_repeats
        return (restarts + 1) * timeouts.weight_sync_s + restarts * timeouts.engine_start_s + 10 * timeouts.rpc_s

    def members(self) -> list[int]:
        """Return the indices of the replicas in the current publication, or in the next."""
        return self.call("members", timeout_s=self.timeouts.rpc_s)

    def devices(self) -> list[HeldDevices]:
        """Return the devices that each serving replica holds."""
        return self.call("devices", timeout_s=self.timeouts.rpc_s)

    def engine_handles(self) -> PoolHandles:
        """Return the handles by which the weight sync calls the engines."""
        return PoolHandles(self)

    def drain(self) -> None:
        """Wait until all running responses have ended. Others are held back until `set_version`."""
        bound = self.timeouts.generate_s + CALL_MARGIN_S
        self._call("drain", (), {}, bound, note=lambda _: self._record.note(admits=False))

    def announce(self, version: int) -> None:
        """Report that engines are about to get `version`, which their tokens may carry from now on."""

        def note(answer: None) -> None:
            self._record.note(announced=version)
            self._syncing = threading.get_ident()

        self._call("announce", (version,), {}, self.timeouts.rpc_s, note=note)

    def set_version(self, version: int, admit: bool = True) -> Counters:
        """Report that the engines serve `version`; with `admit`, also start the groups that it allows."""

        def note(answer: Counters) -> None:
            self._record.published(version, admit)
            self._syncing = None
            self._changed.notify_all()

        counters: Counters = self._call("set_version", (version, admit), {}, self.timeouts.rpc_s, note=note)[0]
        return counters

    def admit(self, needed: int) -> Counters:
        """Start every group that the published version allows. `needed`: the step for whose batch the trainer waits."""
        note = lambda _: self._record.note(admits=True, needed=needed)  # noqa: E731
        counters: Counters = self._call("admit", (needed,), {}, self.timeouts.rpc_s, note=note)[0]
        return counters

    def wait_batch(
        self, step: int, timeout_s: float | None = None, *, asleep: bool = False
    ) -> BatchReady | PublicationNeeded:
        """Wait until all groups of `step` are in the queue and return its batch, or until no replica is left.

        With `asleep` do not wait: engines sleep.
        """
        bound = timeout_s or self.timeouts.generate_s
        # A wait in slices must outlive a short cut of the network, too.
        margin_s = max(CALL_MARGIN_S, self.timeouts.rpc_s)

        def note(answer: BatchReady | PublicationNeeded) -> None:
            if isinstance(answer, BatchReady):
                self._record.taken(answer)

        answer, rebuilds = self._call("wait_batch", (step, bound, asleep), {}, bound + margin_s, note=note)
        return replace(answer, rebuilds=rebuilds) if isinstance(answer, BatchReady) else answer

    def keep(self, step: int, rebuilds: int) -> bool:
        """Note that all ranks have read the batch of `step`, which the trainer now holds.

        False if the controller that gave it has since died (`rebuilds`: that of the batch). The new one does not know
        it, and will draw its groups again.
        """
        with self._changed:
            if self.handle.rebuilds != rebuilds:
                return False
            self._record.keep(step)
            return True

    def commit(self, step: int, **ends: Unpack[StepEnds]) -> Counters:
        """Settle every group of `step`: report how many ended in each way."""

        def note(answer: CommitAnswer) -> None:
            self._record.committed(step, answer.history)

        answer: CommitAnswer = self._call("commit_and_report", (step,), dict(ends), self.timeouts.rpc_s, note=note)[0]
        return answer.counters

    def evaluate(self, version: int, label: str = "") -> list[SetReport] | PublicationNeeded:
        """Evaluate every held-out set, greedy and sampled; with `label`, also write RUN_DIR/eval_{label}.jsonl.

        Only a trainer, which has called `begin`, may be asked to publish first.
        """
        reports = self.evaluate_unless(lambda: False, version, label)
        assert reports is not None
        return reports

    def evaluate_unless(
        self, stopped: Callable[[], bool], version: int, label: str = ""
    ) -> list[SetReport] | PublicationNeeded | None:
        """Evaluate as `evaluate`, but return None soon after `stopped()` has become true. The pool continues alone."""

        def check() -> None:
            if stopped():
                raise _Stopped

        timeout_s = self.timeouts.generate_s + CALL_MARGIN_S
        try:
            reports: list[SetReport] | PublicationNeeded = self._call(
                "evaluate", (version, label), {}, timeout_s, check
            )[0]
        except _Stopped:
            return None
        return reports

    def start_evaluation(self, version: int, label: str) -> None:
        """Begin to evaluate every held-out set alongside training. Every replica serves `version` now."""
        note = lambda _: self._record.note(evaluation=label)  # noqa: E731
        self._call("start_evaluation", (version, label), {}, self.timeouts.rpc_s, note=note)

    def take_evaluations(self, wait_s: float = 0.0) -> list[FinishedEvaluation] | PublicationNeeded:
        """Return the evaluations alongside training that have ended; with `wait_s`, wait for the running one, or until
        no replica is left.
        """
        bound = wait_s + CALL_MARGIN_S if wait_s else self.timeouts.rpc_s

        def note(answer: list[FinishedEvaluation]) -> None:
            self._record.evaluated([each.label for each in answer])

        finished: list[FinishedEvaluation] = self._call("take_evaluations", (wait_s,), {}, bound, note=note)[0]
        return finished

    def quarantine(self, replica: int, reason: str) -> tuple[bool, str]:
        """Take a replica out until the next publication replaces it; return whether it was done, and a description."""
        return self.call("quarantine", replica, reason, timeout_s=self.timeouts.rpc_s)

    def references(self, group_ids: Sequence[int]) -> dict[int, str]:
        """Return the reference answers of groups, by group id."""
        return self.call("references", list(group_ids), timeout_s=self.timeouts.rpc_s)

    def state_dict(self) -> dict[str, Any]:
        """Return the committed history of the rollout side as JSON content."""
        return self.call("state_dict", timeout_s=self.timeouts.rpc_s)

    def saved(self, step: int) -> None:
        """Report that the checkpoint of the first `step` steps is complete."""
        self.call("saved", step, timeout_s=self.timeouts.rpc_s)

    def begin(self, state: dict[str, Any] | None) -> Counters:
        """Go back to a committed history (None: to its beginning). Every trainer calls this first."""
        timeouts = self.timeouts
        bound = timeouts.engine_start_s + 3 * timeouts.rpc_s
        counters: Counters = self._call("begin", (state,), {}, bound, note=lambda _: self._record.begun(state))[0]
        return counters

    def close(self) -> None:
        """End the pool: supervisor, Ray, engines. Bounded by `timeouts.shutdown_s`."""
        import ray

        try:
            with own_sigterm_handler():
                ray.shutdown()
        finally:
            stop_supervisor(
                Path(self.handle.run_dir), self.handle.process, self.handle.launch_id, self.timeouts.shutdown_s,
                self.handle.host,
            )  # fmt: skip


class PoolReplica:
    """One replica as the weight sync calls it; thread-safe."""

    def __init__(
        self, index: int, actor: ActorHandle | None, log: Path, check: Callable[[], None], reach_s: float
    ) -> None:
        """`actor`: the replica's EngineReplica, None if it has ended; `log`: its log file, named in errors.

        `check` raises if the pool has ended. `reach_s`: how long a cut of the network is waited for.
        """
        self.index = index
        self.name = f"replica {index}"
        self._actor = actor
        self._log = log
        self._check = check
        self._reach_s = reach_s

    def call(self, method: str, *args: object, timeout_s: float) -> Any:  # noqa: ANN401  # Ray does not know the type
        """Call one method of the replica and wait for its result, whose type is the method's.

        Raises ReplicaFailed, naming the replica, if it failed or died, and EngineMayRun if it could not be reached;
        TimeoutError after `timeout_s`, and PoolEnded.
        """
        import ray

        if self._actor is None:
            raise ReplicaFailed(
                self.index, f"{self.name} had already ended when it was asked to {method}; see {self._log}"
            )
        try:
            return call_once(
                self._actor, method, args, {}, timeout_s=timeout_s, reach_s=self._reach_s, check=self._check
            )
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"{self.name} did not answer {method} within {timeout_s:.0f} s") from None
        except PoolEnded:
            raise
        except ConnectionCut as error:
            waited = f"could not be reached for {error.seconds:.0f} s, in which it was asked to {method}"
            raise EngineMayRun(self.index, f"{self.name} {waited}; see {self._log}: {error}") from error
        except Exception as error:
            raise as_rollout_error(self.index, method, error, f"see {self._log}") from error


class PoolHandles:
    """The pool as the weight sync uses it: replicas that can be called and replaced by name."""

    def __init__(self, client: PoolClient) -> None:
        self._client = client

    def replicas(self) -> Sequence[PoolReplica]:
        """Return each replica. Those of lost ones raise ReplicaFailed, so that a sync replaces them."""
        logs = Path(self._client.handle.run_dir) / "logs"
        check, reach_s = self._client.handle.check, self._client.timeouts.rpc_s
        return [
            PoolReplica(index, self._actor(index), logs / f"replica-{index}.log", check, reach_s)
            for index in self._client.members()
        ]

    def names(self) -> Sequence[str]:
        """Return the names of the replicas that take part in the next sync."""
        return [f"replica {index}" for index in self._client.members()]

    def _actor(self, index: int) -> ActorHandle | None:
        """Return the replica's actor; None if it has ended, because Ray then forgets its name."""
        import ray

        try:
            return ray.get_actor(replica_name(index), namespace=self._client.handle.namespace)
        except ValueError:
            return None

    def restart(self, names: Sequence[str], timeout_s: float) -> None:
        """Replace the named replicas by new ones, or leave out those that cannot be.

        Raises RolloutError if one does not start.
        """
        self._client.call("restart_replicas", _indices(names), timeout_s=timeout_s)

    def replace_later(self, names: Sequence[str], timeout_s: float) -> None:
        """End the named replicas; new ones join with a later sync. Raises RolloutError as `restart`."""
        self._client.call("replace_replicas_later", _indices(names), timeout_s=timeout_s)


def _indices(names: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("replica ")) for name in names]


def _own_error(error: RayTaskError) -> Exception:
    """Return the controller's own exception if its type is known, otherwise a RolloutError with the cause."""
    cause = error.cause
    if isinstance(cause, ReplicaFailed):
        return ReplicaFailed(cause.replica, str(cause))
    if isinstance(cause, (RolloutError, ValueError, TimeoutError)):
        return type(cause)(str(cause))
    return RolloutError(f"the rollout controller failed: {type(cause).__name__}: {cause}")
