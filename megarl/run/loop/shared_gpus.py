"""The GPUs that trainer and engines share (`rollout.share_gpus`): moves the memory of both sides from turn to turn.

Every method is collective over the trainer ranks, and does nothing where each side has GPUs of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.schema import Config
from megarl.run.loop.gpu_turns import GpuTurns, Turn
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.record.recorder import Recorder
from megarl.trainer.parking import NOTHING, Part
from megarl.trainer.policy import Policy
from megarl.weights.group.protocols import EngineHandles, ReplicaHandle
from megarl.weights.send.sleep import put_to_sleep, wake_caches

logger = logging.getLogger(__name__)

_NAMES: Codec[list[str]] = codec_of(list[str])
_MOVED: Codec[int] = codec_of(int)


class SharedGpus:
    """Gives the GPUs to the engines and takes them back. The only place that moves memory between both sides."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        peers: ControlGroup,
        recorder: Recorder,
        engines: Callable[[], EngineHandles | None],
    ) -> None:
        """`engines`: the handles of the pool, on rank 0."""
        self.shared = config.rollout.share_gpus
        self._rpc_s, self._policy = config.timeouts.rpc_s, policy
        self._peers, self._recorder, self._engines = peers, recorder, engines
        self._turns = GpuTurns()

    @property
    def engines_sleep(self) -> bool:
        """True while the trainer has the GPUs."""
        return self.shared and self._turns.turn is Turn.TRAIN

    def train(self) -> None:
        """Have the whole state of the trainer on its GPUs, and the engines asleep.

        Raises WeightSyncError, on other ranks than the first PeerFailedError, if an engine has not let go in time.
        """
        if not self.shared or self.engines_sleep:
            return
        if self._turns.turn is not Turn.GENERATE:
            raise RuntimeError(f"the trainer cannot have the GPUs in the turn {self._turns.turn}")
        with self._recorder.phase("sync"):
            self._turns.hand_over(["engines"])
            failed = self._peers.on_first_rank(lambda: put_to_sleep(self._replicas(), self._rpc_s), _NAMES)
            if failed:
                self._recorder.say(f"{', '.join(failed)} could not sleep; the next publication replaces them")
            self._turns.let_go(["engines"])
            self._policy.memory.hold(self._turns.trainer_holds)

    def publish(self) -> None:
        """Leave the engines room for their weights, and keep the trainer's."""
        if self.shared:
            self.train()
            self._turns.publish(self._ranks)
            with self._recorder.phase("sync"):
                self._await_ranks()

    def generate(self) -> None:
        """Give the GPUs to the engines, which have all weights of a version, and let them generate."""
        if not self.shared:
            return
        self._turns.hand_back(self._ranks)
        self._await_ranks()
        failed = self._peers.on_first_rank(lambda: wake_caches(self._replicas(), self._rpc_s), _NAMES)
        if failed:
            self._recorder.say(f"{', '.join(failed)} could not generate again after a publication")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the GPUs to engines that are being started, and then hold again what the trainer held."""
        if not self.shared:
            yield
            return
        memory = self._policy.memory
        before = memory.resident
        self._hold(NOTHING, "leave the GPUs to an engine that starts")
        try:
            yield
        finally:
            memory.hold(before)

    @property
    def _ranks(self) -> list[str]:
        return [f"trainer rank {rank}" for rank in range(self._peers.world)]

    def _await_ranks(self) -> None:
        """Hold what the turn allows, and wait until every rank does: an engine may use the GPUs of several."""
        turn = self._turns.turn
        moved = self._hold(self._turns.trainer_holds, f"let go of the GPUs ({turn})")
        logger.info("%s: the ranks have moved %s bytes", turn, self._peers.gather(moved, _MOVED))
        self._turns.let_go(self._ranks)

    def _hold(self, parts: frozenset[Part], what: str) -> int:
        """Hold these parts, wait until every rank does, and return the bytes that were moved. Raises PeerTimeout."""
        self._peers.barrier()  # rank 0 may come late, from calls to the pool
        moved = self._policy.memory.hold(parts)
        self._peers.await_all(what, self._rpc_s, "timeouts.rpc_s")
        return moved

    def _replicas(self) -> Sequence[ReplicaHandle]:
        engines = self._engines()
        assert engines is not None  # only rank 0 calls them
        return engines.replicas()
