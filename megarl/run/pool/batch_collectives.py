"""The ways in which the ranks agree on a batch: the collectives of a thread, and its waits for the rollout.

A collective must be called in the same order on all ranks, and training calls those of its communicators all the time.
So a thread that works beside training has process groups of its own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar, cast

from megarl.common.errors import BatchNotReady
from megarl.common.trust.object_collectives import TEXT, Codec, broadcast, codec_of
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.record.recorder import Recorder
from megarl.telemetry.metrics.timer import Phase
from megarl.trainer import parallel

T = TypeVar("T")

_RANKS: Codec[tuple[int, ...]] = codec_of(tuple[int, ...])

# How often a thread that waits for a batch looks whether it is asked to stop, and tells the other ranks that it waits.
SLICE_S = 2.0
LEAST_S = 0.05  # the shortest question, if a bound has nearly passed


class Channel(Protocol):
    """The collectives over which a batch is taken and fetched. Every rank calls them in the same order."""

    def wait(self, ask: Callable[[float | None], T], codec: Codec[T | None]) -> T:
        """Return on every rank what `ask` returns on rank 0.

        `ask` gets a bound in seconds (None: that of the config), and raises BatchNotReady when it has passed. `codec`
        must also have None, which stands for "not yet".
        """

    def in_replica(self, own: T | None, codec: Codec[T]) -> T:
        """Return the leader's `own` on every rank of its replica."""

    def of_replicas(self, own: str) -> Sequence[str]:
        """Return the texts of all replicas, each at least once."""

    def phase(self, name: Phase, status: str = "") -> AbstractContextManager[None]:
        """Count the time of the block as a phase of the step, if the trainer waits for it."""


class MainChannel:
    """The communicators of the training thread."""

    def __init__(self, peers: ControlGroup, recorder: Recorder) -> None:
        self._peers = peers
        self.phase = recorder.phase

    def wait(self, ask: Callable[[float | None], T], codec: Codec[T | None]) -> T:
        """Ask on rank 0 with the bound of the config."""
        return cast(T, self._peers.on_first_rank(lambda: ask(None), codec))

    def in_replica(self, own: T | None, codec: Codec[T]) -> T:
        """Broadcast over the ranks that hold parts of one model."""
        return parallel.model_parallel_broadcast_object(own, codec)

    def of_replicas(self, own: str) -> Sequence[str]:
        """Gather over the data-parallel group."""
        return parallel.dp_all_gather_object(own, TEXT)


class ChannelClosed(Exception):  # noqa: N818
    """The wait was ended by `close`."""


class BackgroundChannel:
    """Gloo groups for one thread beside training: one of all ranks, and one of each replica.

    A wait for a batch begins long before the trainer needs it. Its bound, `timeouts.generate_s`, counts from the call
    of `hurry`. Rank 0 asks again and again, which the other ranks follow. So no rank waits longer in a collective than
    its time-out allows, and `close` ends the wait within `SLICE_S`: `ray.shutdown` finds no thread that waits in Ray.
    """

    def __init__(self, timeouts: TimeoutsConfig) -> None:
        """Form the groups. Collective over all ranks, in the main thread, with the parallel layout initialised."""
        self._peers = ControlGroup(timeouts)
        own = parallel.replica_ranks()
        replicas = sorted(set(self._peers.gather(tuple(own), _RANKS)))
        groups = {ranks: self._peers.subgroup(ranks) for ranks in replicas if len(ranks) > 1}
        self._leader, self._replica = own[0], groups.get(tuple(own))
        self._bound_s = timeouts.generate_s
        self._hurried_at: float | None = None
        self._closed = threading.Event()

    def hurry(self) -> None:
        """Let the bound of the current wait count from now: the trainer has nothing else to do."""
        self._hurried_at = time.monotonic()

    def relax(self) -> None:
        """Let the next wait take as long as training takes."""
        self._hurried_at = None

    def close(self) -> None:
        """End the wait of every rank's thread. Needed on rank 0 only; the others follow."""
        self._closed.set()

    def wait(self, ask: Callable[[float | None], T], codec: Codec[T | None]) -> T:
        """Ask on rank 0 in slices of `SLICE_S`, until there is a result.

        Raises ChannelClosed after `close`, and BatchNotReady when the bound has passed.
        """
        while True:
            result = self._peers.on_first_rank(lambda: self._ask_once(ask), codec)
            if result is not None:
                return result

    def _ask_once(self, ask: Callable[[float | None], T]) -> T | None:
        if self._closed.is_set():
            raise ChannelClosed("the run stops")
        hurried_at = self._hurried_at
        left = math.inf if hurried_at is None else self._bound_s - (time.monotonic() - hurried_at)
        try:
            return ask(min(SLICE_S, max(left, LEAST_S)))
        except BatchNotReady as error:
            if left > SLICE_S:
                return None
            waited = f"the trainer waited {self._bound_s:.0f} s (timeouts.generate_s) for its batch"
            raise BatchNotReady(f"{waited}; at last, {error}") from None

    def in_replica(self, own: T | None, codec: Codec[T]) -> T:
        """Broadcast over the replica's own gloo group."""
        if self._replica is None:
            return own  # type: ignore[return-value]
        return broadcast(own, codec, self._leader, self._replica)

    def of_replicas(self, own: str) -> Sequence[str]:
        """Gather over all ranks: every replica answers once per rank."""
        return self._peers.gather(own, TEXT)

    def phase(self, name: Phase, status: str = "") -> AbstractContextManager[None]:
        """Return nothing to count: the trainer does not wait for this thread."""
        return nullcontext()
