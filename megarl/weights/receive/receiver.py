"""The receiving half of a weight sync: receives each bucket, checks its digest, loads its tensors.

While one bucket is checked and loaded, the next one is received. After a part of a split tensor the next one waits
until the part has left its buffer, because the whole tensor takes memory too. A bucket whose digest differs from its
trailer is never loaded. Independent of vLLM: the loader (`loaders.py`) loads the tensors.

Shapes: B bytes of a flat uint8 buffer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.common.errors import DigestMismatch
from megarl.weights.group.transport import Group, PendingBroadcast
from megarl.weights.plan.buckets import Bucket, BucketPlan, bucket_plan
from megarl.weights.plan.digest import digest
from megarl.weights.receive.recorded_copies import tensors_on

if TYPE_CHECKING:
    from megarl.weights.receive.loaders import ModelLoader


class Receiver:
    """Receives syncs on one engine worker."""

    def __init__(self, group: Group, plan: BucketPlan, loader: ModelLoader, device: torch.device) -> None:
        self.group, self.plan, self._loader, self._device = group, plan, loader, device
        self.has_all = False  # of the tensors, so that a sync may leave out some
        self._buffers = ReceiveBuffers(plan.buffer_bytes, device, loader)

    def receive(
        self, sync: int, version: int, timeout_s: float, *, layer_span: int | None, plan_hash: str,
        left_out: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Receive and load all buckets, and send a report to the leader: digests, their seconds, and the loader's way.

        `timeout_s`: the time for the whole sync; `layer_span`, `plan_hash` and `left_out`: those of the sender's plan.

        Raises:
            ValueError: `plan_hash` is that of another plan, the plan mixes layers and the loader cannot take that, or
                it leaves out tensors that have not arrived yet.
            WeightSyncError: the sync failed. This exception and all exceptions of the loader are raised after the
                failure was reported, the other members were released and this group was aborted.
        """
        group = self.group
        if (layer_span, frozenset(left_out)) != (self.plan.layer_span, self.plan.left_out):
            self.plan = bucket_plan(self.plan.specs, self.plan.bucket_bytes, layer_span, left_out)
            self._buffers = ReceiveBuffers(self.plan.buffer_bytes, self._device, self._loader)
        group.begin(sync, len(self.plan.buckets), timeout_s)
        try:
            if plan_hash != self.plan.hash:
                raise ValueError(
                    f"this sync follows plan {plan_hash}, {group.name} has {self.plan.hash}: trainer and engines must "
                    "run the same version of megarl"
                )
            if left_out and not self.has_all:
                raise ValueError(f"this sync leaves out tensors that {group.name} has not got yet: {len(left_out)}")
            if layer_span is None and self._loader.obstacle is not None:
                raise ValueError(
                    "the plan of this sync mixes the tensors of all layers, which needs an engine that loads in place; "
                    f"{group.name} cannot: {self._loader.obstacle}"
                )
            digests, digest_s = self._receive_all(version)
            report = {"member": group.name, "digests": digests, "digest_s": digest_s, "loaded": self._loader.report}
            group.store.put(group.key("report", group.rank), report)
            self.has_all = True
        except BaseException as error:
            group.fail(error)
            raise

    def _receive_all(self, version: int) -> tuple[list[int], float]:
        """Receive, check and load every bucket in the plan's order. Return the digests, and the seconds they took."""
        digests, digest_s = list[int](), 0.0
        assembler, loader = Assembler(self.plan), self._loader
        buckets = self.plan.buckets
        on_wire = [self._post(buckets[0])] if buckets else []
        for bucket in buckets:
            split = self.plan.is_split(bucket)
            buffer_B, pending = on_wire.pop()
            pending.wait()
            del pending  # it refers to the buffer
            if not split:
                on_wire += self._post_after(bucket)
            start = time.perf_counter()
            digests.append(self._check(buffer_B, bucket, version))
            digest_s += time.perf_counter() - start
            tensors = assembler.tensors(bucket, buffer_B)
            if split:
                del buffer_B  # its content was copied, and a large tensor needs the memory
                on_wire += self._post_after(bucket)
                loader.load(tensors)
                del tensors  # otherwise a large tensor would live until the next bucket is loaded
            else:
                loader.load(tensors)
                del tensors
                self._buffers.release(buffer_B)
        assembler.close()
        self._buffers.clear()
        return digests, digest_s

    def _post_after(self, bucket: Bucket) -> list[tuple[torch.Tensor, PendingBroadcast]]:
        """Start to receive the bucket after this one, if there is one."""
        following = self.plan.buckets[bucket.index + 1 : bucket.index + 2]
        return [self._post(each) for each in following]

    def _post(self, bucket: Bucket) -> tuple[torch.Tensor, PendingBroadcast]:
        """Start to receive a bucket. Return its buffer and the broadcast."""
        buffer_B = self._buffers.take()
        root = self.group.members.senders.index(bucket.owner)
        return buffer_B, self.group.broadcast(buffer_B[: bucket.wire_bytes], root, bucket.index)

    def _check(self, buffer_B: torch.Tensor, bucket: Bucket, version: int) -> int:
        """Return the bucket's digest; raise DigestMismatch if it differs from the trailer."""
        value = int(digest(buffer_B[: bucket.nbytes], version=version, bucket=bucket.index).item())
        sent = int(buffer_B[bucket.nbytes : bucket.wire_bytes].view(torch.int64).item())
        if value != sent:
            raise DigestMismatch(
                f"bucket {bucket.index + 1} of version {version} from trainer rank {bucket.owner} has digest "
                f"{value & (2**64 - 1):016x}, its trailer says {sent & (2**64 - 1):016x}; it was not loaded. If "
                "this repeats, check the memory of both devices and the network between them"
            )
        return value


class Assembler:
    """Makes named tensors from buckets: views of the buffer, or a copy for a tensor that is split over buckets."""

    def __init__(self, plan: BucketPlan) -> None:
        self._plan = plan
        self._partial_B: torch.Tensor | None = None

    def tensors(self, bucket: Bucket, buffer_B: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that this bucket completes, in order."""
        complete = []
        for piece in bucket.pieces:
            spec = self._plan.specs[piece.tensor]
            content_B = buffer_B[piece.offset : piece.offset + piece.nbytes]
            if piece.nbytes < spec.nbytes:
                if piece.start == 0:
                    self._partial_B = torch.empty(spec.nbytes, dtype=torch.uint8, device=buffer_B.device)
                assert self._partial_B is not None
                self._partial_B[piece.start : piece.start + piece.nbytes].copy_(content_B)
                if piece.start + piece.nbytes < spec.nbytes:
                    continue
                content_B, self._partial_B = self._partial_B, None
            complete.append((spec.name, content_B.view(getattr(torch, spec.dtype)).view(spec.shape)))
        return complete

    def close(self) -> None:
        """Check that no tensor is incomplete."""
        assert self._partial_B is None, "a tensor was left incomplete"


class ReceiveBuffers:
    """Two receive buffers, which are reused until the sync is over.

    A loader may keep references to loaded tensors until their module is complete. Before a buffer is reused, the loader
    copies the tensors that it still needs (at most a part of one fused module). If anything else refers to the buffer,
    a new one replaces it.
    """

    def __init__(self, nbytes: int, device: torch.device, loader: ModelLoader) -> None:
        self._nbytes, self._device, self._loader = nbytes, device, loader
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """Return a free buffer, uint8 [B]; allocate one if there is none."""
        if self._free:
            return self._free.pop()
        return torch.empty(self._nbytes, dtype=torch.uint8, device=self._device)

    def release(self, buffer_B: torch.Tensor) -> None:
        """Keep the buffer for reuse if nothing else refers to it and no other is free; otherwise drop it."""
        self._loader.detach(buffer_B)
        if not self._free and tensors_on(buffer_B) == 1:
            self._free.append(buffer_B)

    def clear(self) -> None:
        """Free the memory, which belongs to the engine between syncs."""
        self._free.clear()
