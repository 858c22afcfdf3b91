"""The buffers in which a trainer rank builds its buckets, and the place of each of its tensors in them.

All views of the buffers are made once per plan, so that a sync costs little host time per tensor.

Shapes: B bytes of a flat uint8 buffer, E elements of the rows that a piece touches; targets are [rows, ...] as the
tensor itself.
"""

import math
from dataclasses import dataclass, field

import torch

from megarl.models.hf.gather import GatherRequest, Rows
from megarl.weights.plan.buckets import BUFFERS, Bucket, BucketPlan, BucketSlice, TensorSpec
from megarl.weights.plan.digest import digest


@dataclass
class _Place:
    """The place in which an own bucket is built.

    `gaps`: the bytes between pieces, which must be zero. `parts`: for a piece that begins or ends inside a row, the
    piece's place in the bucket and its elements in the buffer of whole rows that it is copied from.
    """

    buffer_B: torch.Tensor
    gaps: list[torch.Tensor] = field(default_factory=list)
    parts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class BucketPacker:
    """Builds the buckets of one trainer rank in a ring of buffers. Kept between syncs."""

    def __init__(self, plan: BucketPlan, rank: int, device: torch.device) -> None:
        self._plan, self.device = plan, device
        own = [bucket for bucket in plan.buckets if bucket.owner == rank]
        sizes = [max(bucket.wire_bytes for bucket in own[place::BUFFERS]) for place in range(min(BUFFERS, len(own)))]
        others = [bucket.wire_bytes for bucket in plan.buckets if bucket.owner != rank]
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        self.scratch_B = torch.empty(max(others, default=0), dtype=torch.uint8, device=device)
        self._rows_B = torch.empty(self._rows_bytes(own), dtype=torch.uint8, device=device)
        self._places: dict[int, _Place] = {}
        self._targets: dict[int, list[torch.Tensor]] = {}
        for number, bucket in enumerate(own):
            self._lay_out(bucket, self._buffers[number % BUFFERS])

    def requests(self) -> list[GatherRequest]:
        """Return for each bucket of the plan the rows that it is made of; those of own buckets have their targets."""
        found = []
        for bucket in self._plan.buckets:
            rows = tuple(_rows(piece, self._plan.specs[piece.tensor]) for piece in bucket.pieces)
            found.append(GatherRequest(rows, tuple(self._targets.get(bucket.index, ()))))
        return found

    def wire(self, bucket: Bucket) -> torch.Tensor:
        """Return the bytes of an own bucket that are broadcast."""
        return self._places[bucket.index].buffer_B[: bucket.wire_bytes]

    def seal(self, bucket: Bucket, version: int) -> int:
        """Complete an own bucket after its tensors are in place: zero the gaps, add the digest, and return it.

        When this returns, the buffer has been written: reading the digest waits for the device.
        """
        place = self._places[bucket.index]
        if place.gaps:
            torch._foreach_zero_(place.gaps)
        for target, source in place.parts:
            target.copy_(source)
        value = digest(place.buffer_B[: bucket.nbytes], version=version, bucket=bucket.index)
        place.buffer_B[bucket.nbytes : bucket.wire_bytes].view(torch.int64).copy_(value)
        return int(value.item())

    def _rows_bytes(self, own: list[Bucket]) -> int:
        """Return the size of the buffer for whole rows: the largest piece with the rest of its first and last row."""
        sizes = [0]
        for bucket in own:
            for piece in bucket.pieces:
                spec = self._plan.specs[piece.tensor]
                if not _is_whole_rows(piece, spec):
                    rows = _rows(piece, spec)
                    sizes.append((rows.stop - rows.start) * _row_bytes(spec))
        return max(sizes)

    def _lay_out(self, bucket: Bucket, buffer_B: torch.Tensor) -> None:
        """Make the views of one own bucket."""
        place = _Place(buffer_B)
        targets = []
        end = 0
        for piece in bucket.pieces:
            spec = self._plan.specs[piece.tensor]
            dtype: torch.dtype = getattr(torch, spec.dtype)
            rows = _rows(piece, spec)
            shape = (rows.stop - rows.start, *spec.shape[1:]) if spec.shape else ()
            if piece.offset > end:
                place.gaps.append(buffer_B[end : piece.offset])
            end = piece.offset + piece.nbytes
            target = buffer_B[piece.offset : end].view(dtype)
            if not _is_whole_rows(piece, spec):
                rows_E = self._rows_B[: (rows.stop - rows.start) * _row_bytes(spec)].view(dtype)
                skipped = (piece.start - rows.start * _row_bytes(spec)) // dtype.itemsize
                place.parts.append((target, rows_E[skipped : skipped + target.numel()]))
                target = rows_E
            targets.append(target.view(shape))
        if bucket.nbytes > end:
            place.gaps.append(buffer_B[end : bucket.nbytes])
        self._places[bucket.index] = place
        self._targets[bucket.index] = targets


def _row_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one row of a tensor; at least 1, so that an empty row can be divided by."""
    rows = spec.shape[0] if spec.shape else 1
    return max(1, spec.nbytes // rows if rows else math.prod(spec.shape[1:]))


def _rows(piece: BucketSlice, spec: TensorSpec) -> Rows:
    """Return the rows that a piece touches. A tensor without axes has one row."""
    if piece.nbytes == spec.nbytes:
        return Rows(piece.tensor, 0, spec.shape[0] if spec.shape else 1)
    size = _row_bytes(spec)
    return Rows(piece.tensor, piece.start // size, -(-(piece.start + piece.nbytes) // size))


def _is_whole_rows(piece: BucketSlice, spec: TensorSpec) -> bool:
    rows = _rows(piece, spec)
    return (rows.stop - rows.start) * _row_bytes(spec) == piece.nbytes or piece.nbytes == spec.nbytes
