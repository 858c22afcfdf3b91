"""ServingController: the controller of a pool that only serves its gateway, without trainer and queue.

The engines read the model's weights when they start. So a lost or added replica can serve without a publication, and
the controller renews the pool by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from megarl.common.errors import RolloutError
from megarl.common.process.memory_tuning import collect_rarely, exempt_present_objects
from megarl.common.rundir.notices import write_notice
from megarl.rollout.engine.replica import ReplicaSpec
from megarl.rollout.fleet.replica_table import State
from megarl.rollout.orchestrator.pool_controller import PoolController
from megarl.telemetry.trace import events

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
