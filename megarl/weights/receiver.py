"""One receiving worker's half of a sync: take each bucket off the wire, check it, load it.

The next bucket is on the wire while the last one is checked and loaded. A bucket whose digest differs from its
trailer is never loaded. Knows nothing of vLLM: what loads is a function.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megarl.common.errors import ConnectionLost, DigestMismatch, PeerTimeout, SyncAborted
from megarl.weights.buckets import Bucket, BucketPlan
from megarl.weights.digest import digest
from megarl.weights.transport import Group, PendingBroadcast

logger = logging.getLogger(__name__)


class Loader(Protocol):
    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load whole tensors, in the manifest's order. They may be views of a receive buffer."""

    def detach(self, buffer: torch.Tensor) -> None:
        """Copy what is still held of `buffer`, which is to be overwritten."""


class Receiver:
    def __init__(self, group: Group, plan: BucketPlan, loader: Loader, device: torch.device) -> None:
        self.group, self.plan, self._loader = group, plan, loader
        self._buffers = ReceiveBuffers(plan.buffer_bytes, device, loader)

    def receive(self, sync: int, version: int, timeout_s: float, *, plan_hash: str) -> dict[str, Any]:
        """Receive and load all buckets. The report (digests, seconds) is also given to the leader.

        Raises:
            WeightSyncError and whatever the loader raises; the other members have then been told and released,
            and this group is aborted.
        """
        group = self.group
        group.begin(sync, len(self.plan.buckets), timeout_s)
        report: dict[str, Any] = {"member": group.name, "failure": None}
        try:
            if plan_hash != self.plan.hash:
                raise ValueError(f"this sync follows plan {plan_hash}, {group.name} has {self.plan.hash}")
            report |= self._receive_all(version)
        except BaseException as error:
            report["failure"] = str(error) or repr(error)
            report["secondary"] = isinstance(error, SyncAborted | ConnectionLost)
            report["failed_members"] = list(error.failed_members) if isinstance(error, PeerTimeout) else []
            self._report(report)
            group.abort()
            raise
        self._report(report)
        return report

    def _report(self, report: dict[str, Any]) -> None:
        """Tell the leader, and on failure release the others; a lost leader must not hide the first error."""
        try:
            self.group.board.put(self.group.key("report", self.group.rank), report)
            if report["failure"] is not None:
                self.group.post_abort(f"{self.group.name}: {report['failure']}")
        except RuntimeError:
            logger.exception("%s could not report to the leader", self.group.name)

    def _receive_all(self, version: int) -> dict[str, Any]:
        seconds = {"wait": 0.0, "digest": 0.0, "load": 0.0}
        digests: list[int] = []
        assembler = Assembler(self.plan)
        buckets = self.plan.buckets
        on_wire = [self._post(buckets[0])] if buckets else []
        for bucket in buckets:
            buffer, pending = on_wire.pop()
            start = time.perf_counter()
            pending.wait()
            del pending  # it holds on to the buffer
            arrived = time.perf_counter()
            if bucket.index + 1 < len(buckets):
                on_wire.append(self._post(buckets[bucket.index + 1]))
            posted = time.perf_counter()
            digests.append(self._check(buffer, bucket, version))
            checked = time.perf_counter()
            tensors = assembler.tensors(bucket, buffer)
            if self.plan.is_split(bucket):
                del buffer  # copied: its memory is what loading a large tensor needs
                self._loader.load(tensors)
            else:
                self._loader.load(tensors)
                del tensors
                self._buffers.release(buffer)
            seconds["wait"] += arrived - start
            seconds["digest"] += checked - posted
            seconds["load"] += time.perf_counter() - checked
        assembler.close()
        self._buffers.clear()
        return {"digests": digests, "seconds": seconds}

    def _post(self, bucket: Bucket) -> tuple[torch.Tensor, PendingBroadcast]:
        buffer = self._buffers.take()
        root = self.group.layout.senders.index(bucket.owner)
        return buffer, self.group.broadcast(buffer[: bucket.wire_bytes], root, bucket.index)

    def _check(self, buffer: torch.Tensor, bucket: Bucket, version: int) -> int:
        value = int(digest(buffer[: bucket.nbytes], version=version, bucket=bucket.index).item())
        sent = int(buffer[bucket.nbytes : bucket.wire_bytes].view(torch.int64).item())
        if value != sent:
            raise DigestMismatch(
                f"bucket {bucket.index + 1} of version {version} from trainer rank {bucket.owner} has digest "
                f"{value & (2**64 - 1):016x}, its trailer says {sent & (2**64 - 1):016x}; it was not loaded"
            )
        return value


class Assembler:
    """Turns buckets into named tensors: views of the buffer, or a tensor of its own where it spans buckets."""

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._partial: torch.Tensor | None = None

    def tensors(self, bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The tensors that this bucket completes, in order."""
        complete = []
        for piece in bucket.pieces:
            spec = self._plan.specs[piece.tensor]
            content = buffer[piece.offset : piece.offset + piece.nbytes]
            if piece.nbytes < spec.nbytes:
                if piece.start == 0:
                    self._partial = torch.empty(spec.nbytes, dtype=torch.uint8, device=buffer.device)
                assert self._partial is not None
                self._partial[piece.start : piece.start + piece.nbytes].copy_(content)
                if piece.start + piece.nbytes < spec.nbytes:
                    continue
                content, self._partial = self._partial, None
            complete.append((spec.name, content.view(getattr(torch, spec.dtype)).view(spec.shape)))
        return complete

    def close(self) -> None:
        assert self._partial is None, "a tensor was left incomplete"


class ReceiveBuffers:
    """Two receive buffers, reused until the sync is over.

    A loader may hold on to loaded tensors until their module is complete. Before a buffer is reused it copies out
    what it still holds (at most a part of one fused module); should anything else refer to the buffer, a fresh one
    takes its place.
    """

    def __init__(self, nbytes: int, device: torch.device, loader: Loader) -> None:
        self._nbytes, self._device, self._loader = nbytes, device, loader
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        if self._free:
            return self._free.pop()
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def release(self, buffer: torch.Tensor) -> None:
        self._loader.detach(buffer)
        if not self._free and tensors_on(buffer) == 1:
            self._free.append(buffer)

    def clear(self) -> None:
        """Between syncs the memory is the engine's."""
        self._free.clear()


def tensors_on(buffer: torch.Tensor) -> int:
    """How many tensors share the buffer's storage, itself included."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)) - 1
