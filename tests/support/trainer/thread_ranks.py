"""Trainer ranks as threads of one process, with the collectives of `Peers` and of the parallel state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from megarl.common.trust.object_collectives import Codec
from megarl.run.ranks.failure import PeerFailedError

T = TypeVar("T")
WAIT_S = 20.0


class ThreadRanks:
    """Runs a function on every rank of `replicas` replicas of `size` ranks each.

    An object of this class also stands for the module `megarl.trainer.parallel`: its functions answer for the rank
    whose thread calls them. A rank that waits longer than WAIT_S for the others raises BrokenBarrierError.
    """

    def __init__(self, replicas: int = 1, size: int = 1) -> None:
        self.replicas, self.size, self.world = replicas, size, replicas * size
        self._here = threading.local()
        self._barrier = threading.Barrier(self.world)
        self._slots: list[Any] = [None] * self.world
        self._replica_barriers = [threading.Barrier(size) for _ in range(replicas)]
        self._leaders: list[Any] = [None] * replicas

    def run(self, function: Callable[[ThreadPeers], T]) -> list[T | Exception]:
        """Return what `function` returned or raised on each rank, in rank order."""

        def on(rank: int) -> T | Exception:
            self._here.rank = rank
            try:
                return function(ThreadPeers(self, rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.world) as threads:
            return list(threads.map(on, range(self.world)))

    def exchange(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks in rank order."""
        self._slots[self._here.rank] = mine
        self._barrier.wait(WAIT_S)
        everyone = list(self._slots)
        self._barrier.wait(WAIT_S)
        return everyone

    def dp_rank(self) -> int:
        return self._here.rank // self.size

    def dp_size(self) -> int:
        return self.replicas

    def is_leader(self) -> bool:
        return self._here.rank % self.size == 0

    def in_replica(self, obj: T | None, codec: Codec[T]) -> T:
        replica = self.dp_rank()
        if self.is_leader():
            self._leaders[replica] = codec.encode(obj)  # type: ignore[arg-type]
        self._replica_barriers[replica].wait(WAIT_S)
        content = self._leaders[replica]
        self._replica_barriers[replica].wait(WAIT_S)
        return codec.decode(content)

    def dp_all_gather_object(self, obj: T, codec: Codec[T]) -> list[T]:
        return [
            codec.decode(part) for part in self.exchange(codec.encode(obj))[self._here.rank % self.size :: self.size]
        ]


class ThreadPeers:
    """`Peers` of one rank."""

    group = None

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self.rank, self.world = ranks, rank, ranks.world

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def on_first_rank(self, function: Callable[[], T], codec: Codec[T]) -> T:
        """Run `function` on rank 0; it raises there what the function raised, and PeerFailedError elsewhere."""
        result = b""
        failure: Exception | None = None
        if self.is_first:
            try:
                result = codec.encode(function())
            except Exception as error:
                failure = error
        result, cause = self._ranks.exchange((result, failure))[0]
        if cause is not None:
            raise cause if self.is_first else PeerFailedError(f"trainer rank 0 failed: {cause}")
        return codec.decode(result)

    def any(self, mine: bool) -> bool:
        return any(self._ranks.exchange(mine))

    def gather(self, mine: T, codec: Codec[T]) -> list[T]:
        return [codec.decode(each) for each in self._ranks.exchange(codec.encode(mine))]
