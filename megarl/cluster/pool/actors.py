"""The actors of a pool: replicas, engines of teachers, the controller, which starts the queue, and the gateway.

They are named but not `lifetime="detached"`: the supervisor's process owns them, so even its SIGKILL ends them.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.cluster.pool.gateway_keeper import GatewayKeeper
from megarl.cluster.pool.pool_process import SupervisorSpec
from megarl.common.errors import RolloutError
from megarl.common.process.processes import ProcessId
from megarl.common.rundir.notices import write_notice
from megarl.config.checks.sections import max_sequence_tokens
from megarl.config.derived.teachers import engine_teachers, sharing_teachers
from megarl.config.schema import Config
from megarl.config.schema.algorithm import TeacherConfig
from megarl.gateway.actor import GatewaySpec
from megarl.models.hf.read_config import load_info
from megarl.rollout.engine.placement import HEAD_RESOURCE, HEAD_SHARE, ROLLOUT_RESOURCE
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.replica_start import create_replica
from megarl.rollout.engine.teachers.teacher_engine import create_teacher

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

CONTROLLER = "controller"


class PoolActors:
    """Creates the actors, waits for their starts, replaces the controller, and ends them."""

    def __init__(self, spec: SupervisorSpec, config: Config, stop_reason: Callable[[], str | None]) -> None:
        """`stop_reason`: returns why the pool must stop, which ends each wait; None if it need not."""
        self._spec, self._config, self._stop_reason = spec, config, stop_reason
        self._run_dir = Path(spec.run_dir)
        self._own_head = config.ray.address is None
        self.handles: list[ActorHandle] = []  # the controller last
        self.gateway: GatewayKeeper | None = None  # if the run has one

    @property
    def controller(self) -> ActorHandle:
        """The present controller, once `start` has created it."""
        return self.handles[-1]

    def start(self) -> None:
        """Start the replicas and the controller (which starts the queue) at once.

        A gateway opens too, if the run has one. Raises RolloutError naming the first that failed.
        """
        spec, config = self._spec, self._config
        replica_spec = self._replica_spec()
        pending: dict[ObjectRef, str] = {}
        replicas = [create_replica(replica_spec, index) for index in range(config.rollout.replicas)]
        for index, replica in enumerate(replicas):
            pending[replica.start.remote()] = f"engine replica {index}"
        sharing = sharing_teachers(config.teachers)
        alone = [each for each in engine_teachers(config.teachers) if each not in sharing]
        teachers = self._start_teachers(alone, replica_spec, pending)
        controller = self._create_controller(spec.partition, config.timeouts.rpc_s)
        self.handles = [*replicas, *teachers, controller]
        pending[controller.start.remote()] = "the rollout controller"
        opening = self._open_gateway(replica_spec)
        if opening is not None:
            pending[opening] = "the gateway"
        answers = self._await(pending, config.timeouts.engine_start_s)
        if self.gateway is not None:
            self.gateway.opened(answers["the gateway"])
        # Each fits on a GPU only after all engines of the policy have theirs, and measures its memory alone.
        pending = {}
        self.handles[-1:-1] = self._start_teachers(sharing, replica_spec, pending)
        self._await(pending, config.timeouts.engine_start_s)

    def replace_controller(self, partition: str) -> None:
        """Restart the controller and the queue that it owns; the new queue is `partition`.

        Raises RolloutError if they do not start.
        """
        import ray

        timeouts = self._config.timeouts
        ray.kill(self.handles.pop())
        controller = self._create_controller(partition, timeouts.rpc_s, replaces=True)
        self.handles.append(controller)
        self._await({controller.start.remote(): "the new rollout controller"}, timeouts.engine_start_s)

    def _start_teachers(
        self, teachers: Sequence[TeacherConfig], pool: ReplicaSpec, pending: dict[ObjectRef, str]
    ) -> list[ActorHandle]:
        """Create the engines of teachers; add the references of their starts to `pending`."""
        created = []
        for teacher in teachers:
            for number in range(teacher.replicas):
                created.append(create_teacher(pool, teacher.name, number))
                pending[created[-1].start.remote()] = f"engine {number} of teacher {teacher.name}"
        return created

    def _open_gateway(self, pool: ReplicaSpec) -> ObjectRef | None:
        """Create the gateway, if the run has one; return the reference of its start."""
        settings = self._config.gateway
        if not settings.enabled:
            return None
        self.gateway = GatewayKeeper(
            GatewaySpec(pool, CONTROLLER, settings.port, self._spec.gateway_token_file),
            own_head=self._own_head,
            bound_s=self._config.timeouts.rpc_s,
            start_s=self._config.timeouts.engine_start_s,
            say=lambda text: write_notice(self._run_dir, text),
        )
        return self.gateway.open()

    def _replica_spec(self) -> ReplicaSpec:
        """Return the arguments of replicas and controller."""
        spec, config = self._spec, self._config
        return ReplicaSpec(
            config_json=spec.config_json,
            run_dir=spec.run_dir,
            namespace=spec.namespace,
            cuda=spec.cuda,
            max_model_len=max_sequence_tokens(config, load_info(config.model.path)),
            supervisor=ProcessId.own() if self._own_head else None,
            host=platform.node(),
        )

    def _create_controller(self, partition: str, timeout_s: float, *, replaces: bool = False) -> ActorHandle:
        """Create the controller's actor, not started. `replaces`: another one held its name until now.

        Raises RolloutError if the name is not free within `timeout_s`.
        """
        import ray

        from megarl.rollout.orchestrator.controller import RolloutController
        from megarl.rollout.orchestrator.pool_controller import ServingController

        spec, deadline = self._spec, time.monotonic() + timeout_s
        head = {HEAD_RESOURCE: HEAD_SHARE} if self._own_head else {}
        options = {"resources": {ROLLOUT_RESOURCE: 1, **head}, "num_cpus": 1, "max_concurrency": 1000}
        kind = ServingController if self._spec.serves else RolloutController
        named = ray.remote(kind).options(name=CONTROLLER, namespace=spec.namespace, **options)
        while True:
            try:
                return named.remote(self._replica_spec(), partition, cwd=spec.cwd, replaces=replaces)
            except ValueError:  # the name becomes free only after Ray has noticed the death of the old actor
                if not replaces or self._stop_reason() is not None or time.monotonic() > deadline:
                    waited = f"the supervisor waited {timeout_s:.0f} s for the end of the old rollout controller"
                    raise RolloutError(self._stop_reason() or waited) from None
                time.sleep(0.1)

    def _await(self, pending: dict[ObjectRef, str], timeout_s: float) -> dict[str, Any]:
        """Wait for every start call in `pending` (reference -> name of the part); return the answers by name.

        Raises RolloutError.
        """
        import ray

        answers: dict[str, Any] = {}
        deadline = time.monotonic() + timeout_s
        while pending:
            if self._stop_reason() is not None:
                raise RolloutError(f"stopped while starting: {self._stop_reason()}")
            if time.monotonic() > deadline:
                waited = ", ".join(pending.values())
                raise RolloutError(
                    f"the supervisor waited {timeout_s:.0f} s for {waited}; see {self._run_dir / 'logs'}"
                )
            done, _ = ray.wait(list(pending), timeout=0.2)
            for reference in done:
                name = pending.pop(reference)
                try:
                    answers[name] = ray.get(reference)
                except Exception as error:
                    raise RolloutError(f"{name}: {cause_of(error)}; see {self._run_dir / 'logs'}") from error
                logger.info("%s is up: %s", name, answers[name])
        return answers

    def close(self, timeout_s: float) -> None:
        """Shut the actors down, kill them after `timeout_s` at the latest, and disconnect from Ray."""
        import ray

        if not ray.is_initialized():
            return
        try:
            actors = [*(self.gateway.close() if self.gateway is not None else ()), *self.handles]
            ray.wait([a.shutdown.remote() for a in actors], num_returns=len(actors) or 1, timeout=timeout_s)
            for actor in actors:
                ray.kill(actor)
        except Exception as error:
            logger.warning("closing the actors: %s", error)
        ray.shutdown()


def cause_of(error: BaseException) -> str:
    """Return an actor's exception as one line, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    inner = cause if isinstance(cause, BaseException) else error
    lines = [line for line in str(inner).strip().splitlines() if line.strip()]
    text = lines[-1] if lines and type(inner).__name__.startswith("RayTask") else (lines[0] if lines else "")
    return text or type(inner).__name__
