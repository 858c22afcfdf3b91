"""The sending half of a weight sync: packs owned tensors into buckets, adds digests, broadcasts in the plan's order.

Two threads and two buffers: while one bucket is broadcast, the next one is packed. The broadcasting thread takes part
in the broadcasts of all buckets; it receives those of other senders into a scratch buffer. It waits for nothing but the
packing of its own buckets, so no order of gathers and broadcasts can cause a deadlock.

Shapes: B bytes of a flat uint8 buffer.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from typing import Any

import torch

from megarl.common.errors import ConnectionLost, PeerTimeout, SyncAborted, WeightSyncError
from megarl.weights.buckets import Bucket, BucketPlan, BucketSlice
from megarl.weights.digest import digest
from megarl.weights.transport import POLL_S, Group, PendingBroadcast

logger = logging.getLogger(__name__)


class SendBuffers:
    """Two packing buffers, and a scratch buffer for the broadcasts of other senders. They are kept between syncs."""

    def __init__(self, plan: BucketPlan, rank: int, device: torch.device) -> None:
        own = max((b.wire_bytes for b in plan.buckets if b.owner == rank), default=0)
        others = max((b.wire_bytes for b in plan.buckets if b.owner != rank), default=0)
        self.pack = [torch.empty(own, dtype=torch.uint8, device=device) for _ in range(2 if own else 0)]
        self.scratch_B = torch.empty(others, dtype=torch.uint8, device=device)


class Sending:
    """One sync of one sending rank: call `offer` with each owned tensor in manifest order, then `finish`."""

    def __init__(self, group: Group, plan: BucketPlan, rank: int, version: int, buffers: SendBuffers) -> None:
        self._group, self._plan, self._rank, self._version = group, plan, rank, version
        self._scratch_B = buffers.scratch_B
        self._free: queue.Queue[torch.Tensor] = queue.Queue()
        for buffer in buffers.pack:
            self._free.put(buffer)
        self._ready: queue.Queue[torch.Tensor] = queue.Queue()
        self._own = deque(bucket for bucket in plan.buckets if bucket.owner == rank)
        self._todo = deque(self._own[0].pieces) if self._own else deque()
        self._buffer_B: torch.Tensor | None = None
        self._failed = threading.Event()
        self.digests: dict[int, int] = {}
        self.seconds = {"pack": 0.0, "digest": 0.0, "buffer_wait": 0.0}
        self._thread = threading.Thread(target=self._broadcast_all, name="weight-broadcast", daemon=True)
        self._thread.start()

    def offer(self, number: int, tensor: torch.Tensor) -> None:
        """Pack tensor `number` of the manifest. After the sync has failed this does nothing.

        Raises:
            WeightSyncError: shape or dtype of the tensor differ from the manifest.
        """
        if self._failed.is_set():
            return
        spec = self._plan.specs[number]
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise WeightSyncError(
                f"exporter yielded {spec.name} as {tuple(tensor.shape)} {tensor.dtype}, "
                f"its manifest says {spec.shape} {spec.dtype}"
            )
        while self._todo and self._todo[0].tensor == number:
            if self._buffer_B is None:
                self._buffer_B = self._take()
                if self._buffer_B is None:
                    return
            start = time.perf_counter()
            _copy_piece(self._buffer_B, self._todo.popleft(), tensor)
            self.seconds["pack"] += time.perf_counter() - start
            if not self._todo:
                self._seal(self._own.popleft(), self._buffer_B)
                self._buffer_B = None
                self._todo = deque(self._own[0].pieces) if self._own else deque()

    def finish(self) -> None:
        """Wait until all buckets are sent, then write this rank's report. Failures of peers raise nothing here.

        Raises:
            WeightSyncError: the exporter ended before this rank's last tensor.
        """
        if self._own and not self._failed.is_set():
            first = self._plan.specs[self._own[0].pieces[0].tensor].name
            raise WeightSyncError(f"exporter ended before {first}, which trainer rank {self._rank} owns")
        self._thread.join()  # it ends in time: all its waits have the deadline of the sync
        if not self._failed.is_set():
            self._report({"digests": self.digests, "seconds": self.seconds})

    def fail(self, error: BaseException) -> None:
        """Report a failure of this rank, and release all members from their waits."""
        first = not self._failed.is_set()
        self._failed.set()
        if not first:
            return
        secondary = isinstance(error, SyncAborted | ConnectionLost)
        failed_members = list(error.failed_members) if isinstance(error, PeerTimeout) else []
        failure = str(error) or repr(error)
        self._report({"failure": failure, "secondary": secondary, "failed_members": failed_members})
        try:
            self._group.post_abort(failure)
        except RuntimeError:
            logger.exception("could not post the abort of a weight sync")
        self._group.abort()

    def _take(self) -> torch.Tensor | None:
        """Wait for a free packing buffer; return None if the sync fails meanwhile."""
        start = time.perf_counter()
        try:
            while not self._failed.is_set():
                try:
                    return self._free.get(timeout=POLL_S)
                except queue.Empty:
                    continue  # the broadcasting thread checks deadline and abort, and sets _failed
            return None
        finally:
            self.seconds["buffer_wait"] += time.perf_counter() - start

    def _seal(self, bucket: Bucket, buffer_B: torch.Tensor) -> None:
        """Set the gaps to zero, write the digest into the trailer, and pass the bucket on to be broadcast."""
        start = time.perf_counter()
        end = 0
        for piece in bucket.pieces:
            buffer_B[end : piece.offset].zero_()
            end = piece.offset + piece.nbytes
        buffer_B[end : bucket.nbytes].zero_()
        value = digest(buffer_B[: bucket.nbytes], version=self._version, bucket=bucket.index)
        buffer_B[bucket.nbytes : bucket.wire_bytes].view(torch.int64).copy_(value)
        self.digests[bucket.index] = int(value.item())
        self.seconds["digest"] += time.perf_counter() - start
        self._ready.put(buffer_B)

    def _broadcast_all(self) -> None:
        """Take part in the broadcasts of all buckets, in the plan's order, at most two at a time."""
        try:
            if self._scratch_B.device.type == "cuda":
                torch.cuda.set_device(self._scratch_B.device)
            before: tuple[PendingBroadcast, torch.Tensor | None] | None = None
            for bucket in self._plan.buckets:
                if before is not None and before[1] is None and bucket.owner != self._rank:
                    # Members relay a broadcast from their buffers, and the scratch buffer holds one bucket at a time.
                    self._complete(before)
                    before = None
                current = self._start(bucket)
                self._complete(before)
                before = current
            self._complete(before)
        except BaseException as error:
            self.fail(error)

    def _start(self, bucket: Bucket) -> tuple[PendingBroadcast, torch.Tensor | None]:
        """Start one broadcast. Return it with its packing buffer, or None if another rank sends the bucket."""
        mine = bucket.owner == self._rank
        buffer_B = self._await_packed(bucket) if mine else self._scratch_B
        root = self._group.members.senders.index(bucket.owner)
        pending = self._group.broadcast(buffer_B[: bucket.wire_bytes], root, bucket.index)
        return pending, buffer_B if mine else None

    def _await_packed(self, bucket: Bucket) -> torch.Tensor:
        while True:
            try:
                return self._ready.get(timeout=POLL_S)
            except queue.Empty:
                self._group.check(f"its own bucket {bucket.index + 1} to be packed")

    def _complete(self, started: tuple[PendingBroadcast, torch.Tensor | None] | None) -> None:
        if started is not None:
            pending, buffer_B = started
            pending.wait()
            if buffer_B is not None:
                self._free.put(buffer_B)

    def _report(self, fields: dict[str, Any]) -> None:
        report = {"member": self._group.name, "failure": None, **fields}
        try:
            self._group.store.put(self._group.key("report", self._group.rank), report)
        except RuntimeError:
            logger.exception("%s could not report to the leader", self._group.name)


def _copy_piece(buffer_B: torch.Tensor, piece: BucketSlice, tensor: torch.Tensor) -> None:
    """Copy the piece's bytes of the tensor to their place in the buffer; any strides, any device."""
    target = buffer_B[piece.offset : piece.offset + piece.nbytes].view(tensor.dtype)
    if piece.nbytes == tensor.numel() * tensor.element_size():
        target.view(tensor.shape).copy_(tensor)
    else:
        first = piece.start // tensor.element_size()
        target.copy_(tensor.reshape(-1)[first : first + target.numel()])
