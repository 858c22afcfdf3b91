"""PoolController: the base of the controllers of a training run and of `megarl serve`.

Both have replicas, which the user may list and change while the pool runs, and requests from the pool's gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megarl.common.errors import RolloutError
from megarl.common.process.memory_tuning import begin_start, collect_rarely, exempt_present_objects
from megarl.common.process.output import redirect_output
from megarl.common.rundir.notices import write_notice
from megarl.config.derived.teachers import policy_gpus
from megarl.config.schema import Config
from megarl.rollout.engine.placement import engine_needs, free_places
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.engine.replica_start import EndedReplica, create_replica, restart_replica, start_replica
from megarl.rollout.fleet.elastic_pool import ElasticPool, ReplicaReport, find_replicas
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.fleet.external_requests import ExternalDrop, ExternalNews, ExternalRequest, ExternalRequests
from megarl.rollout.fleet.replica_table import State
from megarl.rollout.transport.link import Parcel
from megarl.rollout.transport.rpc import AnsweredCalls
from megarl.telemetry.trace import events
from megarl.telemetry.trace.lines import CONTROLLER

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class PoolController:
    """An actor with a fleet, the changes of its pool (`elastic`), and the requests of its gateway."""

    _fleet: EnginePool
    elastic: ElasticPool

    def __init__(self, spec: ReplicaSpec, *, replaces: bool) -> None:
        """`replaces`: it takes the place of a dead controller, with live engines."""
        begin_start()
        self.spec, self._replaces = spec, replaces
        self.config = Config.model_validate_json(spec.config_json)
        self.run_dir = Path(spec.run_dir)
        redirect_output(self.run_dir / "logs" / "controller.log")
        events.open_events(self.config.telemetry.events_mib, self.run_dir, CONTROLLER)
        self._external_requests: ExternalRequests | None = None  # until the fleet is there
        self._calls = AnsweredCalls()

    async def answer(self, key: str, method: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
        """Call a method once, however often a caller resends the same `key` after a lost connection."""
        return await self._calls.answer(key, lambda: getattr(self, method)(*args, **kwargs))

    async def _attach_fleet(self) -> None:
        """Attach to the run's first replicas, whose actors the supervisor creates.

        When it replaces a controller, a missing actor counts as ended. The gateway's requests wait until the engines
        serve. Raises RolloutError naming the first actor that does not exist within `timeouts.engine_start_s`.
        """
        import ray

        rollout, timeouts, wait = self.config.rollout, self.config.timeouts, not self._replaces
        replicas = await find_replicas(self.spec.namespace, rollout.replicas, timeouts.engine_start_s, wait)
        logs = self.run_dir / "logs"
        self._fleet = EnginePool(
            replicas,
            timeouts,
            lambda index, old: restart_replica(self.spec, index, old, timeouts),
            lambda index: f"see {logs / f'replica-{index}.log'}",
            report_interval_s=rollout.report_interval_s,
            sync_restarts=self.config.weight_sync.restarts,
            shrinks=not rollout.share_gpus,  # nothing could start a missing engine, and it may still hold memory
        )
        if not wait:
            self._fleet.table.leave_out(int(path.stem.removeprefix("replica-")) for path in logs.glob("replica-*.log"))

        async def start(index: int, placed: Callable[[], object]) -> ActorHandle:
            return await start_replica(create_replica(self.spec, index), index, timeouts, placed=placed)

        def end(replica: ActorHandle | EndedReplica) -> None:
            if not isinstance(replica, EndedReplica):
                ray.kill(replica)

        needs = engine_needs(policy_gpus(rollout, self.config.teachers), cuda=self.spec.cuda)
        notify = partial(write_notice, self.run_dir)
        self.elastic = ElasticPool(
            self._fleet, timeouts, start, end, partial(free_places, needs), notify, fixed=rollout.share_gpus
        )
        self._external_requests = ExternalRequests(self._fleet, serves=False)

    @property
    def _external(self) -> ExternalRequests:
        """The gateway's requests. Raises RolloutError before this actor has started."""
        if self._external_requests is None:
            raise RolloutError("the rollout controller is still starting")
        return self._external_requests

    async def give(self, number: int, messages: Sequence[ExternalRequest | ExternalDrop], link: str) -> None:
        """Take requests of the gateway, see `LinkServer.give`. Admission ignores them."""
        await self._external.link.give(number, messages, link)

    async def take(self, seen: int, wait_s: float, link: str) -> Parcel[ExternalNews]:
        """Return news of the gateway's requests, see `LinkServer.take`."""
        return await self._external.link.take(seen, wait_s, link)

    async def list_replicas(self) -> tuple[list[ReplicaReport], int]:
        """Return the state of every replica, and how many are missing because there is no room for them."""
        return await self.elastic.reports(), self._fleet.table.missing

    async def change_pool(self, action: Literal["drain", "undrain", "remove", "add"], number: int) -> str:
        """Do a command of `megarl pool`, by the method of `ElasticPool`. Raises RolloutError if it is impossible."""
        done: str = await getattr(self.elastic, action)(number)
        return done


# ServingController: the controller of a pool that only serves its gateway, without trainer and queue.
#
# The engines read the model's weights when they start. So a lost or added replica can serve without a publication,
# and the controller renews the pool by itself.

logger = logging.getLogger(__name__)

VERSION = "0"  # of the weights that the engines read
ENGINE_LOOK_S = 0.5
RENEW_S = 10.0  # between two attempts to replace lost replicas


class ServingController(PoolController):
    """The actor that the supervisor creates in place of a RolloutController; see the module's docstring."""

    def __init__(self, spec: ReplicaSpec, partition: str, *, cwd: str = "", replaces: bool = False) -> None:
        """`partition` and `cwd` are unused: it has no queue and no prompts. `replaces`: see RolloutController."""
        super().__init__(spec, replaces=replaces)
        spec.watch_supervisor()
        self._renewal: asyncio.Task[None] | None = None
        self._renew_at = 0.0

    async def start(self) -> dict[str, float]:
        """Attach to the replicas and wait until their engines are up. Returns the duration as `start_s`.

        Raises RolloutError naming a replica that does not come up.
        """
        started = time.monotonic()
        await self._attach_fleet()
        self._fleet.expect_publication(True)  # requests wait for a replica that is replaced
        if self._replaces:  # the engines still work for a dead controller
            await self._fleet.take_over(in_sync=False)
        exempt_present_objects()
        collect_rarely()
        self.elastic.open()
        await asyncio.gather(*(self._await_engine(index) for index in self._fleet.serving))
        self._external.serve()
        return {"start_s": time.monotonic() - started}

    async def _await_engine(self, index: int) -> None:
        """Wait until a replica's engine, which the supervisor starts, is up; label its weights."""
        bound_s = self.config.timeouts.engine_start_s
        deadline = time.monotonic() + bound_s
        while True:
            try:
                return await self._fleet.call(index, "set_weight_version", VERSION, timeout_s=bound_s)
            except RolloutError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ENGINE_LOOK_S)

    async def heartbeat(self) -> None:
        """Replace lost replicas in the background. The supervisor calls it at intervals."""
        await self.elastic.tend()
        idle = self._renewal is None or self._renewal.done()
        waits = any(each.lost or each.state is State.NEW for each in self._fleet.table)
        if idle and waits and time.monotonic() >= self._renew_at:
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Let lost and added replicas serve, as a publication would: healthy ones at once, others restarted."""
        try:
            await self._fleet.begin_sync()
            broken = [index for index in self._fleet.lost if not self._fleet.table[index].coming]
            if broken:
                write_notice(self.run_dir, f"replicas {sorted(broken)} were lost and are started again")
                await self._fleet.restart(sorted(broken))
        except RolloutError as error:
            logger.warning("lost replicas are tried again: %s", error)
        finally:
            self._fleet.admit_joining()
            await self._label()
            self._renew_at = time.monotonic() + RENEW_S

    async def _label(self) -> None:
        """Label the weights of all replicas; new ones lack the label."""
        for index in self._fleet.serving:
            with contextlib.suppress(RolloutError):  # its next request shows that it is lost
                bound_s = self.config.timeouts.rpc_s
                await self._fleet.call(index, "set_weight_version", VERSION, timeout_s=bound_s)

    async def shutdown(self) -> None:
        """Drop all requests."""
        if self._external_requests is not None:
            self._external_requests.close()
        events.close_events()
