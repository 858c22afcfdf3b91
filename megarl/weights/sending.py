"""One trainer rank's part in a weight sync: it takes part in gathers, and in broadcasts if it owns tensors.

Every rank walks the buckets in the plan's order on one thread. For bucket k the ranks that hold a part of its tensors
gather them on its owner, G(k); then all senders and all engine workers broadcast it, B(k). So every rank begins its
operations in the order G(0) B(0) G(1) B(1) ..., and leaves out those that it takes no part in.

Why there can be no deadlock, however many queues the hardware has: consider the first operation X of this order that
has not ended. Before a rank begins an operation it waits for nothing but earlier operations of the order, which have
all ended; so all that take part in X have begun it, or will. On the device X can only be behind operations that the
rank began before it (even if all streams share one queue, CUDA_DEVICE_MAX_CONNECTIONS=1), and these have ended too. So
X runs, and ends. Copies and digests are in no circle: they wait for nobody.

Without this order there is a circle, e.g. if one thread gathers and another one broadcasts, with tensor parallel ranks
0 and 1 that both own experts. Rank 1 sends its half of a layer's attention to rank 0; everything that rank 1 issues on
the same stream, or hardware queue, now waits for that send. Its next broadcast is issued there. Rank 0 does not receive
yet, because both its buffers are full; they are broadcast only after that broadcast of rank 1.

B(k) runs while G(k + 1) and the digest of bucket k + 1 do: an owner has two buffers, and waits for B(k) only when the
buffer is needed again. Nothing is written into a buffer in flight: `BucketPacker.seal` reads the digest, which proves
that the buffer was written, and the end of a broadcast is observed before the buffer is used again.

Shapes: B bytes of a flat uint8 buffer.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

from megarl.common.errors import ConnectionLost, PeerTimeout, SyncAborted, WeightSyncError
from megarl.weights.bucket_packer import BucketPacker
from megarl.weights.buckets import Bucket, BucketPlan
from megarl.weights.transport import POLL_S, Group, PendingBroadcast

logger = logging.getLogger(__name__)


class RowGather(Protocol):
    """The part of one rank in the gather of one bucket, see `megarl.models.gather.Gather`."""

    @property
    def owned(self) -> bool:
        """True if this rank receives the rows; else it sends."""

    def copy(self) -> None:
        """Copy what this rank holds: into the targets, or into the messages that it sends."""

    def post(self) -> None:
        """Start to receive, or to send."""

    def done(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` seconds (None: as the group allows) and tell whether all messages have ended."""

    def finish(self) -> None:
        """Copy what was received to the targets. Call it after `done`."""

    def unfinished_peers(self) -> Sequence[int]:
        """Return the global ranks whose messages have not been transferred. Any thread may ask."""


Check: TypeAlias = Callable[[str, RowGather], None]  # raises to end the wait for a gather, at the named place


class Sending:
    """One sync on one trainer rank: call `run`, and `finish_gathers` if other members failed."""

    def __init__(
        self,
        group: Group,
        plan: BucketPlan,
        gathers: Sequence[RowGather | None],
        packer: BucketPacker | None,
        rank: int,
        version: int,
    ) -> None:
        """`gathers`: one per bucket, None where this rank takes no part. `packer`: None on a rank that owns nothing."""
        self._group, self._plan, self._gathers, self._packer = group, plan, gathers, packer
        self._rank, self._version = rank, version
        self._posted: deque[tuple[int, RowGather]] = deque()  # gathers in which this rank sends, by bucket
        self._broadcasts: deque[tuple[Bucket, PendingBroadcast]] = deque()  # at most two
        self._next = 0  # the first bucket whose gather has not been posted
        self.digests: dict[int, int] = {}
        self.seconds = {"gather": 0.0, "digest": 0.0, "broadcast": 0.0}

    @torch.no_grad()
    def run(self) -> None:
        """Take part in all gathers and broadcasts, then write this rank's report.

        Raises:
            WeightSyncError: this rank's deadline has passed, another member failed, or a connection was lost. The
                failure was reported, and all members were released. So with every other exception.
        """
        try:
            for bucket in self._plan.buckets:
                self._begin_gather(bucket, self._check_gather)
                if self._packer is not None:
                    self._broadcast(bucket)
            self._await_gathers(0, self._check_gather)
            while self._broadcasts:
                self._await_broadcast()
            if self._packer is not None:
                self._report({"digests": self.digests, "seconds": self.seconds})
            self._group.progress.finish()
        except BaseException as error:
            self._fail(error)
            raise

    @torch.no_grad()
    def finish_gathers(self, timeout_s: float) -> None:
        """Take part in the gathers that are left, after a failure of engines: the sync may be repeated.

        Raises PeerTimeout if they do not end within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s

        def check(place: str, gather: RowGather) -> None:
            if time.monotonic() > deadline:
                peers = ", ".join(_names(gather.unfinished_peers()))
                waited = f"{self._group.name} waited {timeout_s:.0f} s after a failed weight sync"
                raise PeerTimeout(f"{waited} for {peers} in {place}")

        self._await_gathers(0, check)
        for bucket in self._plan.buckets[self._next :]:
            self._begin_gather(bucket, check)
        self._await_gathers(0, check)

    def _begin_gather(self, bucket: Bucket, check: Check) -> None:
        """Take part in the gather of a bucket. It has ended afterwards on the owner; other ranks may still send."""
        gather = self._gathers[bucket.index]
        if gather is None:
            self._next = bucket.index + 1
            return
        start = time.perf_counter()
        if gather.owned:
            self._group.progress.work(f"packing bucket {bucket.index + 1} of {len(self._plan.buckets)}")
            self._post(bucket, gather)
            gather.copy()
            self._await_gather(self._posted[-1], check)
            self._posted.pop()
            gather.finish()
        else:
            self._await_gathers(1, check)  # each second gather sends from the same memory
            self._group.progress.work(f"packing its part of bucket {bucket.index + 1} of {len(self._plan.buckets)}")
            gather.copy()
            self._post(bucket, gather)
        self.seconds["gather"] += time.perf_counter() - start

    def _post(self, bucket: Bucket, gather: RowGather) -> None:
        try:
            gather.post()
        except RuntimeError as error:
            raise self._group.broken(error) from error
        self._next = bucket.index + 1
        self._posted.append((bucket.index, gather))

    def _await_gathers(self, left: int, check: Check) -> None:
        """Wait until at most `left` of the gathers in which this rank sends have not ended."""
        while len(self._posted) > left:
            self._await_gather(self._posted[0], check)
            self._posted.popleft()

    def _await_gather(self, posted: tuple[int, RowGather], check: Check) -> None:
        bucket, gather = posted
        place = f"the gather of bucket {bucket + 1} of {len(self._plan.buckets)}"
        self._group.progress.wait(place, lambda: _names(gather.unfinished_peers()))
        try:
            while not gather.done(POLL_S):
                check(place, gather)
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            raise self._group.broken(error) from error

    def _check_gather(self, place: str, gather: RowGather) -> None:
        self._group.check(f"{', '.join(_names(gather.unfinished_peers()))} in {place}")

    def _broadcast(self, bucket: Bucket) -> None:
        """Begin the broadcast of a bucket, and end the one before it: the buffer of the next bucket is then free."""
        assert self._packer is not None
        mine = bucket.owner == self._rank
        if mine:
            start = time.perf_counter()
            self.digests[bucket.index] = self._packer.seal(bucket, self._version)
            self.seconds["digest"] += time.perf_counter() - start
            wire_B = self._packer.wire(bucket)
        else:
            # Members relay a broadcast from their buffers, and the scratch buffer holds one bucket at a time.
            while any(other.owner != self._rank for other, _ in self._broadcasts):
                self._await_broadcast()
            wire_B = self._packer.scratch_B[: bucket.wire_bytes]
        root = self._group.members.senders.index(bucket.owner)
        self._broadcasts.append((bucket, self._group.broadcast(wire_B, root, bucket.index)))
        while len(self._broadcasts) > 1:
            self._await_broadcast()

    def _await_broadcast(self) -> None:
        start = time.perf_counter()
        self._broadcasts[0][1].wait()
        self._broadcasts.popleft()
        self.seconds["broadcast"] += time.perf_counter() - start

    def _fail(self, error: BaseException) -> None:
        """Report a failure of this rank, and release all members from their waits."""
        group, failure = self._group, str(error) or repr(error)
        self._broadcasts.clear()
        secondary = isinstance(error, SyncAborted | ConnectionLost | PeerTimeout)
        try:
            self._report({"failure": failure, "secondary": secondary})
            group.post_abort(failure if failure.startswith(group.name) else f"{group.name}: {failure}")
        except RuntimeError:
            logger.exception("%s could not report the failure of a weight sync", group.name)
        group.abort()

    def _report(self, fields: dict[str, Any]) -> None:
        group = self._group
        place = group.name if group.rank is None else group.rank
        group.store.put(group.key("report", place), {"member": group.name, "failure": None, **fields})


def _names(ranks: Sequence[int]) -> list[str]:
    return [f"trainer rank {rank}" for rank in ranks]
