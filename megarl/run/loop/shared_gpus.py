"""Moves the memory of trainer and engines on the GPUs that they share (`rollout.share_gpus`) at each turn.

Every method is collective over the trainer ranks, and does nothing if each side has its own GPUs.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megarl import platforms
from megarl.common.trust.object_collectives import TEXT, Codec, codec_of
from megarl.common.values import GIB
from megarl.config.memory_plan.shared_gpus import SharedMemory
from megarl.run.loop.gpu_turns import GpuTurns, Turn
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.record.recorder import Recorder
from megarl.trainer.parking import NOTHING, Part
from megarl.trainer.policy import Policy
from megarl.weights.group.protocols import EngineHandles, ReplicaHandle
from megarl.weights.send.sleep import HeldMemory, put_to_sleep, wake_caches

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Slept:
    failed: list[str]  # engines
    most: int  # bytes that one holds asleep


@dataclass(frozen=True)
class _Moved:
    copied: int
    held: int  # bytes that the rank has afterwards


_NAMES: Codec[list[str]] = codec_of(list[str])
_SLEPT: Codec[_Slept] = codec_of(_Slept)
_MOVED: Codec[_Moved] = codec_of(_Moved)
SETTLED = 3  # hand-overs after which the kept memory should not grow


class Residue:
    """The memory that each side keeps on GPUs after releasing them, compared with the plan. Pure."""

    def __init__(self, planned: Mapping[str, int]) -> None:
        """`planned`: bytes by side."""
        self._planned = planned
        self._seen: dict[str, list[int]] = {}  # the first SETTLED of each side, and the last

    def note(self, side: str, kept: int) -> None:
        """Record the bytes that a side kept in a hand-over."""
        seen = self._seen.setdefault(side, [])
        self._seen[side] = [*seen[:SETTLED], kept]

    @property
    def values(self) -> dict[str, float]:
        """The values of the monitor's rules: kept over planned memory, and its growth over planned memory."""
        found = {}
        shares = {side: seen[-1] / self._planned[side] for side, seen in self._seen.items() if self._planned.get(side)}
        if shares:
            found["residue"] = max(shares.values())
        grown = [
            (seen[-1] - max(seen[:-1])) / self._planned[side]
            for side, seen in self._seen.items()
            if len(seen) > SETTLED and side in shares
        ]
        return found | ({"residue_growth": max(grown)} if grown else {})


class SharedGpus:
    """Gives the GPUs to the engines and takes them back. The only place that moves memory between both sides."""

    def __init__(
        self,
        policy: Policy,
        peers: ControlGroup,
        recorder: Recorder,
        engines: Callable[[], EngineHandles | None],
        planned: SharedMemory | None,
        *,
        shared: bool,
        rpc_s: float,
    ) -> None:
        """`engines`: the handles of the pool, on rank 0. `planned`: None if it is not known."""
        self.shared, self._rpc_s, self._policy = shared, rpc_s, policy
        self._peers, self._recorder, self._engines = peers, recorder, engines
        self._turns = GpuTurns()
        self._held = HeldMemory()
        kept = {} if planned is None else {"engine": planned.asleep, "trainer": planned.parked}
        if kept and platforms.current().is_cuda:
            kept["engine"] += kept["trainer"]  # the memory in use on a GPU cannot be divided
        self.residue = Residue(kept)

    @property
    def engines_sleep(self) -> bool:
        """True while the trainer has the GPUs."""
        return self.shared and self._turns.turn is Turn.TRAIN

    def train(self) -> None:
        """Bring the whole state of the trainer to its GPUs, with the engines asleep.

        Raises WeightSyncError on rank 0, and PeerFailedError on the others, if an engine has not released its memory in
        time.
        """
        if not self.shared or self.engines_sleep:
            return
        if self._turns.turn is not Turn.GENERATE:
            raise RuntimeError(f"the trainer cannot have the GPUs in the turn {self._turns.turn}")
        with self._recorder.phase("sync"):
            self._turns.hand_over(["engines"])
            slept = self._peers.on_first_rank(self._put_to_sleep, _SLEPT)
            if slept.failed:
                self._recorder.say(f"{', '.join(slept.failed)} could not sleep; the next publication replaces them")
                self._policy.memory.await_room(self._rpc_s, slept.failed)
            if slept.most:
                self._keep("engine", slept.most)
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
        self._keep("trainer", self._await_ranks())
        failed = self._peers.on_first_rank(lambda: wake_caches(self._replicas(), self._rpc_s, self._held), _NAMES)
        if failed:
            self._recorder.say(f"{', '.join(failed)} could not generate again after a publication")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave the GPUs to starting engines, and then restore what the turn allows, unless one fails to start."""
        if not self.shared:
            yield
            return
        self._hold(NOTHING, "leave the GPUs to an engine that starts")
        yield
        self._policy.memory.hold(self._turns.trainer_holds)

    @property
    def _ranks(self) -> list[str]:
        return [f"trainer rank {rank}" for rank in range(self._peers.world)]

    def _await_ranks(self) -> int:
        """Hold what the turn allows, and wait until every rank does, because an engine may use several ranks' GPUs.

        Return the largest number of bytes that a rank then has.
        """
        turn = self._turns.turn
        copied = self._hold(self._turns.trainer_holds, f"let go of the GPUs ({turn})")
        moved = self._peers.gather(_Moved(copied, self._policy.memory.device_bytes), _MOVED)
        logger.info("%s: bytes that the ranks have moved, and hold: %s", turn, moved)
        self._turns.let_go(self._ranks)
        return max(each.held for each in moved)

    def _put_to_sleep(self) -> _Slept:
        failed = put_to_sleep(self._replicas(), self._rpc_s, self._held)
        return _Slept(failed, self._held.most_asleep)

    def _keep(self, side: str, kept: int) -> None:
        self.residue.note(side, kept)
        self._recorder.metrics.record(f"perf/{side}_residue_gib", kept / GIB)

    def _hold(self, parts: frozenset[Part], what: str) -> int:
        """Hold these parts, wait until every rank does, and return the bytes that were moved. Raises PeerTimeout."""
        # This also waits for rank 0, which may come late, from calls to the pool.
        held = self._peers.gather(f"{self._policy.memory.device_bytes / GIB:.2f} GiB", TEXT)
        moved = self._policy.memory.hold(parts)
        self._peers.await_all(what, self._rpc_s, "timeouts.rpc_s", held)
        return moved

    def _replicas(self) -> Sequence[ReplicaHandle]:
        engines = self._engines()
        assert engines is not None  # only rank 0 calls them
        return engines.replicas()
