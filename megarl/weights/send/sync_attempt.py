"""One trainer rank's part in a weight sync: it takes part in gathers, and in broadcasts if it owns tensors.

Every rank goes through the same order of operations (`buckets.py`) on one thread, and skips those in which it has no
part. In the gather of bucket k, G(k), the ranks that hold parts of its tensors send them to its owner, which then adds
the digest. In the broadcast B(k) all senders and all engine workers take part. With one owner the order is G(0) B(0)
G(1) B(1) ...; with several, each has a gather before B(0), while the engines still generate. `SyncAttempt.staged` shows
the leader when this rank has done its part in these; then the engines are paused.

There is no deadlock, however many queues the hardware has. Consider the first operation X of the order that has not
ended. Before an operation a rank waits only for earlier ones, which have all ended. So all participants have begun X,
or will. This holds for the engines too, because the leader calls them as soon as it reaches the first broadcast. On the
device X can only be queued behind operations that the rank began before it, even if all streams share one queue
(CUDA_DEVICE_MAX_CONNECTIONS=1), and these have ended too. So X runs, and ends. Copies and digests wait for nothing. The
argument needs a total order; any will do.

Without such an order there can be a circle. Say one thread gathers and another broadcasts, and tensor-parallel ranks 0
and 1 both own experts. Rank 1 sends its half of a layer's attention to rank 0. Everything that rank 1 issues on the
same stream or hardware queue, such as its next broadcast, now waits for that send. Rank 0 does not receive yet, because
all its buffers are full, and they are broadcast only after that broadcast of rank 1.

B(k) overlaps the next gather of the order and its digest. Only one broadcast runs then, because the rank waits for
earlier ones once B(k) has begun. So the buffer of that gather is free, as `schedule` has arranged. Nothing is written
into a buffer in flight: `BucketPacker.seal` reads the digest, which proves that the buffer was written, and the end of
a broadcast is observed before its buffer is used again.

Shapes: B bytes of a flat uint8 buffer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from megarl.common.errors import PeerTimeout, WeightSyncError
from megarl.models.hf.gather import Gather
from megarl.weights.group.transport import POLL_S, Group, PendingBroadcast
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import Bucket, Order

Check: TypeAlias = Callable[[str, Gather], None]  # raises to end the wait for a gather, at the named place


class SyncAttempt:
    """One sync on one trainer rank: call `run`, and `finish_gathers` if other members failed."""

    def __init__(
        self,
        group: Group,
        order: Order,
        gathers: Sequence[Gather | None],
        packer: BucketPacker | None,
        rank: int,
        version: int,
    ) -> None:
        """`gathers`: one per bucket, None where this rank takes no part. `packer`: None on a rank that owns nothing.

        `order`: of the operations.
        """
        self._group, self._order, self._gathers, self._packer = group, order, gathers, packer
        self._rank, self._version = rank, version
        self._posted: deque[tuple[int, Gather]] = deque()  # gathers in which this rank sends, by bucket
        self._broadcasts: deque[tuple[Bucket, PendingBroadcast]] = deque()  # at most two
        self._next = 0  # the place in the order from which on no gather has been posted
        self.staged = threading.Event()  # this rank has sealed its buckets that are gathered before all broadcasts
        self.digests: dict[int, int] = {}
        self.digest_s = 0.0  # seconds that all digests have taken

    @torch.no_grad()
    def run(self) -> None:
        """Take part in all gathers and broadcasts, then write this rank's report.

        Raises:
            WeightSyncError: this rank's deadline has passed, another member failed, or a connection was lost. The
                failure was reported, and all members were released. So with every other exception.
        """
        try:
            for place, operation in enumerate(self._order):
                if operation.kind == "gather":
                    self._begin_gather(place, self._check_gather)
                    self._seal(operation.bucket)
                else:
                    self.staged.set()
                    self._broadcast(operation.bucket)
            self._await_gathers(0, self._check_gather)
            while self._broadcasts:
                self._await_broadcast()
            if self._packer is not None:
                report = {"member": self._group.name, "digests": self.digests, "digest_s": self.digest_s}
                self._group.store.put(self._group.key("report", self._group.rank), report)
            self._group.progress.mark_done()
        except BaseException as error:
            self._broadcasts.clear()
            self._group.fail(error)
            raise

    @torch.no_grad()
    def finish_gathers(self, timeout_s: float) -> None:
        """Take part in the gathers that are left, after a failure of engines: the sync may be repeated.

        Raises PeerTimeout if they do not end within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s

        def check(place: str, gather: Gather) -> None:
            if time.monotonic() > deadline:
                peers = ", ".join(_names(gather.unfinished_peers()))
                waited = f"{self._group.name} waited {timeout_s:.0f} s after a failed weight sync"
                raise PeerTimeout(f"{waited} for {peers} in {place}")

        self._await_gathers(0, check)
        for place in range(self._next, len(self._order)):
            if self._order[place].kind == "gather":
                self._begin_gather(place, check)
        self._await_gathers(0, check)

    def _begin_gather(self, place: int, check: Check) -> None:
        """Take part in the gather at `place`. It has ended afterwards on the owner; other ranks may still send."""
        bucket = self._order[place].bucket.index
        gather = self._gathers[bucket]
        if gather is None:
            self._next = place + 1
            return
        if gather.owned:
            self._group.progress.work(f"packing bucket {bucket + 1} of {len(self._gathers)}")
            self._post(place, gather)
            gather.copy()
            self._await_gather(self._posted[-1], check)
            self._posted.pop()
            gather.finish()
        else:
            self._await_gathers(1, check)  # each second gather sends from the same memory
            self._group.progress.work(f"packing its part of bucket {bucket + 1} of {len(self._gathers)}")
            gather.copy()
            self._post(place, gather)

    def _post(self, place: int, gather: Gather) -> None:
        try:
            gather.post()
        except RuntimeError as error:
            raise self._group.broken(error) from error
        self._next = place + 1
        self._posted.append((self._order[place].bucket.index, gather))

    def _await_gathers(self, left: int, check: Check) -> None:
        """Wait until at most `left` of the gathers in which this rank sends have not ended."""
        while len(self._posted) > left:
            self._await_gather(self._posted[0], check)
            self._posted.popleft()

    def _await_gather(self, posted: tuple[int, Gather], check: Check) -> None:
        bucket, gather = posted
        place = f"the gather of bucket {bucket + 1} of {len(self._gathers)}"
        self._group.progress.wait(place, lambda: _names(gather.unfinished_peers()))
        try:
            while not gather.done(POLL_S):
                check(place, gather)
        except RuntimeError as error:
            if isinstance(error, WeightSyncError):
                raise
            raise self._group.broken(error) from error

    def _check_gather(self, place: str, gather: Gather) -> None:
        self._group.check(f"{', '.join(_names(gather.unfinished_peers()))} in {place}")

    def _seal(self, bucket: Bucket) -> None:
        """Complete a bucket that this rank owns, and has gathered."""
        if self._packer is None or bucket.owner != self._rank:
            return
        start = time.perf_counter()
        self.digests[bucket.index] = self._packer.seal(bucket, self._version)
        self.digest_s += time.perf_counter() - start

    def _broadcast(self, bucket: Bucket) -> None:
        """Begin the broadcast of a bucket, and end the one before it: the buffer of the next gather is then free."""
        if self._packer is None:
            return
        if bucket.owner == self._rank:
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
        self._broadcasts[0][1].wait()
        self._broadcasts.popleft()


def _names(ranks: Sequence[int]) -> list[str]:
    return [f"trainer rank {rank}" for rank in ranks]
