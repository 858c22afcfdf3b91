"""ServingController: the controller of a pool that only serves its door. There is no trainer, and no queue.

The engines have read the model's weights when they started. So a replica that was lost, or is added, can serve without
a publication: the controller renews the pool by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.common.errors import RolloutError
from megarl.common.garbage import collect_rarely, exempt_present_objects
from megarl.common.notices import write_notice
from megarl.common.output import redirect_output
from megarl.config.schema import Config
from megarl.rollout.attach_fleet import attach_fleet
from megarl.rollout.elastic_pool import ElasticPool, ReplicaReport
from megarl.rollout.foreign_requests import ForeignReport, ForeignRequest, ForeignRequests
from megarl.rollout.placement import engine_needs, free_places
from megarl.rollout.replica import EndedReplica, ReplicaSpec, create_replica, start_replica
from megarl.telemetry import events
from megarl.telemetry.event_budget import CONTROLLER

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

VERSION = "0"  # of the weights that the engines have read
ENGINE_LOOK_S = 0.5
RENEW_S = 10.0  # between two attempts to replace lost replicas


class ServingController:
    """The actor that the supervisor creates in place of a RolloutController; see the module's docstring."""

    def __init__(self, spec: ReplicaSpec, partition: str, *, cwd: str = "", replaces: bool = False) -> None:
        """`partition` and `cwd` are for a queue and prompts, which it has not. `replaces`: see RolloutController."""
        self.spec, self._replaces = spec, replaces
        self.config = Config.model_validate_json(spec.config_json)
        redirect_output(Path(spec.run_dir) / "logs" / "controller.log")
        events.open_events(self.config, Path(spec.run_dir), CONTROLLER)
        spec.watch_supervisor()
        self._foreign_requests: ForeignRequests | None = None
        self._renewal: asyncio.Task[None] | None = None
        self._renew_at = 0.0

    async def start(self) -> dict[str, float]:
        """Attach to the replicas and wait until their engines are up. Returns the seconds that this took, as `start_s`.

        Raises RolloutError naming a replica that does not come up.
        """
        started = time.monotonic()
        self._fleet = await attach_fleet(self.spec, self.config, wait=not self._replaces)
        self._fleet.expect_publication(True)  # requests wait for a replica that is replaced
        self._foreign_requests = ForeignRequests(self._fleet, serves=False)
        self._pool = self._elastic_pool()
        if self._replaces:  # the engines work for a controller that has died
            await self._fleet.take_over([], in_sync=False)
        exempt_present_objects()
        collect_rarely()
        self._pool.open()
        await asyncio.gather(*(self._await_engine(index) for index in self._fleet.serving))
        self._foreign_requests.serve()
        return {"start_s": time.monotonic() - started}

    async def _await_engine(self, index: int) -> None:
        """Wait until a replica's engine, which the supervisor starts, is up; label its weights."""
        bound_s = self.config.timeouts.engine_start_s
        deadline = time.monotonic() + bound_s
        while True:
            try:
                return await self._fleet.actors.call(index, "set_weight_version", VERSION, timeout_s=bound_s)
            except RolloutError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ENGINE_LOOK_S)

    def _elastic_pool(self) -> ElasticPool:
        import ray

        timeouts, needs = self.config.timeouts, engine_needs(self.config, cuda=self.spec.cuda)
        run_dir = Path(self.spec.run_dir)

        async def start(index: int, placed: Callable[[], object]) -> ActorHandle:
            return await start_replica(create_replica(self.spec, index), index, timeouts, placed=placed)

        def end(replica: ActorHandle | EndedReplica) -> None:
            if not isinstance(replica, EndedReplica):
                ray.kill(replica)

        def places() -> int:
            return free_places(needs)

        def notify(text: str) -> None:
            write_notice(run_dir, text)

        return ElasticPool(self._fleet, timeouts, start, end, places, notify)

    async def heartbeat(self) -> None:
        """Replace replicas that were lost, without waiting for that. The supervisor calls it at intervals."""
        await self._pool.tend()
        idle = self._renewal is None or self._renewal.done()
        if idle and (self._fleet.lost or self._fleet.membership.new) and time.monotonic() >= self._renew_at:
            self._renewal = asyncio.get_running_loop().create_task(self._renew())

    async def _renew(self) -> None:
        """Let replicas serve that were lost or added, as a publication would: sound ones at once, others anew."""
        try:
            await self._fleet.begin_sync()
            broken = [index for index in self._fleet.lost if self._fleet.states.state_of(index) != "joining"]
            if broken:
                write_notice(Path(self.spec.run_dir), f"replicas {sorted(broken)} were lost and are started again")
                await self._fleet.restart(sorted(broken))
        except RolloutError as error:
            logger.warning("lost replicas are tried again: %s", error)
        finally:
            self._fleet.admit_joining()
            await self._label()
            self._renew_at = time.monotonic() + RENEW_S

    async def _label(self) -> None:
        """Label the weights of all replicas; those that have just come do not know it."""
        for index in self._fleet.serving:
            with contextlib.suppress(RolloutError):  # its next request tells that it is lost
                bound_s = self.config.timeouts.rpc_s
                await self._fleet.actors.call(index, "set_weight_version", VERSION, timeout_s=bound_s)

    @property
    def _foreign(self) -> ForeignRequests:
        if self._foreign_requests is None:
            raise RolloutError("the controller is still starting")
        return self._foreign_requests

    async def begin_foreign(self, door: str, requests: list[ForeignRequest]) -> None:
        """Begin to work on requests of the door."""
        self._foreign.begin(door, requests)

    async def drop_foreign(self, door: str, names: list[str]) -> None:
        """Stop working on requests of the door."""
        self._foreign.drop(door, names)

    async def take_foreign(self, door: str, seen: int, wait_s: float) -> ForeignReport:
        """Wait for news of the door's requests; see `ForeignRequests.take`."""
        return await self._foreign.take(door, seen, wait_s)

    async def list_replicas(self) -> tuple[list[ReplicaReport], int]:
        """Return the state of every replica, and how many are missing because there is no room for them."""
        return await self._pool.reports(), self._fleet.membership.missing

    async def drain_replica(self, index: int) -> str:
        """Give a replica no more work. Raises RolloutError if that cannot be."""
        return await self._pool.drain(index)

    async def undrain_replica(self, index: int) -> str:
        """Let a drained replica serve again. Raises RolloutError if it is not drained."""
        return await self._pool.undrain(index)

    async def remove_replica(self, index: int) -> str:
        """Drain a replica and end its engine. Raises RolloutError if that cannot be."""
        return await self._pool.remove(index)

    async def add_replicas(self, count: int) -> str:
        """Start further engines. Raises RolloutError if that cannot be."""
        return await self._pool.add(count)

    async def shutdown(self) -> None:
        """Drop all requests."""
        if self._foreign_requests is not None:
            self._foreign_requests.close()
        events.close_events()
