"""The plan of a weight sync: which bytes of which tensor are in which bucket, and which rank sends the bucket.

Pure arithmetic on names, shapes and dtypes: every member computes the same plan from the same manifest, and compares
the plan's hash instead of receiving the plan. Invariants (property-tested): every byte of every tensor that is not left
out is in exactly one piece; a bucket has one owner; a bucket and its trailer fit into `bucket_bytes`; the pieces of a
bucket follow the manifest's order; buckets are in the order of their first tensors.

Several owners share a layer if its experts are spread over ranks. An owner then fills a bucket with its tensors of
several layers, although those of other owners are missing between them. A receiver that loads in place does not mind.
vLLM's layer-wise reload keeps all tensors of incomplete layers, so `layer_span` limits the layers that are incomplete
at one time.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from megarl.models.hf.export import ExportedTensor

ALIGNMENT = 16  # bytes: any dtype can be viewed in place, and no int64 word contains bytes of two pieces
TRAILER_BYTES = 8  # one int64 digest after the payload
RELOAD_LAYER_SPAN = (
    1  # the plan of memory has room for the tensors of one incomplete layer (config/memory_plan/memory.py)
)
_FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DTYPES = (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")  # that can be sent


@dataclass(frozen=True)
class TensorSpec:
    """One Hugging Face tensor as it is sent. `owner` is the global trainer rank that sends it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    owner: int

    @property
    def nbytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return math.prod(self.shape) * itemsize(self.dtype)


@dataclass(frozen=True)
class BucketSlice:
    """A piece: the bytes [start, start + nbytes) of tensor number `tensor`, at byte `offset` of the bucket."""

    tensor: int
    start: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """One broadcast: `nbytes` of payload (a multiple of 8, with zeros in the gaps), followed by the trailer."""

    index: int
    owner: int
    pieces: tuple[BucketSlice, ...]
    nbytes: int

    @property
    def wire_bytes(self) -> int:
        """Bytes that are broadcast: payload and trailer."""
        return self.nbytes + TRAILER_BYTES


@dataclass(frozen=True)
class BucketPlan:
    """The tensors of a sync, in manifest order, and the buckets that carry them, in the order of their broadcasts."""

    specs: tuple[TensorSpec, ...]
    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    layer_span: int | None
    left_out: frozenset[str] = frozenset()  # names of tensors that no bucket carries

    @property
    def owners(self) -> list[int]:
        """The trainer ranks that send, in ascending order."""
        return sorted({spec.owner for spec in self.specs})

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors that are sent, without gaps and trailers."""
        return sum(spec.nbytes for spec in self.specs if spec.name not in self.left_out)

    def is_split(self, bucket: Bucket) -> bool:
        """Return whether the bucket holds a part of a tensor larger than a bucket; it then holds nothing else."""
        return any(piece.nbytes < self.specs[piece.tensor].nbytes for piece in bucket.pieces)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest broadcast."""
        return max((bucket.wire_bytes for bucket in self.buckets), default=TRAILER_BYTES)

    @cached_property
    def hash(self) -> str:
        """A hash of the whole plan, with which members check that their plans are equal."""
        rows = [[b.owner, b.nbytes, [[p.tensor, p.start, p.offset, p.nbytes] for p in b.pieces]] for b in self.buckets]
        document = json.dumps([_spec_rows(self.specs), rows, self.layer_span])
        return hashlib.sha256(document.encode()).hexdigest()[:32]


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of a dtype, given by its name."""
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def specs_of(manifest: Sequence[ExportedTensor | TensorSpec]) -> tuple[TensorSpec, ...]:
    """Convert the manifest to entries of plain, serialisable fields.

    Raises:
        ValueError: a name occurs twice, or a dtype cannot be sent.
    """
    specs = []
    seen: set[str] = set()
    for entry in manifest:
        dtype = str(entry.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            known = ", ".join(sorted(DTYPES))
            raise ValueError(f"tensor {entry.name!r}: dtype {dtype} cannot be sent; known: {known}")
        if entry.name in seen:
            raise ValueError(f"tensor {entry.name!r} occurs twice in the manifest; names must be unique")
        seen.add(entry.name)
        specs.append(TensorSpec(entry.name, tuple(int(n) for n in entry.shape), dtype, int(entry.owner)))
    return tuple(specs)


def bucket_plan(
    manifest: Sequence[ExportedTensor | TensorSpec],
    bucket_bytes: int,
    layer_span: int | None = RELOAD_LAYER_SPAN,
    left_out: Iterable[str] = (),
) -> BucketPlan:
    """Pack the manifest into buckets of at most `bucket_bytes` (trailer included).

    A tensor that fits into one bucket is never split, so the receiver can use it in place. A larger tensor is split
    into byte ranges of whole elements, in its own buckets. `layer_span`: after any bucket, all received tensors behind
    the first missing one are within this many layers of it; None: no limit. `left_out`: names of tensors that every
    member has already.

    Raises:
        ValueError: `bucket_bytes` is too small for one aligned element, `specs_of` refuses the manifest, or a tensor to
            leave out is not in it.
    """
    specs, omitted = specs_of(manifest), frozenset(left_out)
    if unknown := omitted - {spec.name for spec in specs}:
        raise ValueError(f"tensors to leave out that are not in the plan: {len(unknown)}, such as {min(unknown)}")
    return BucketPlan(specs, _pack(specs, bucket_bytes, layer_span, omitted), bucket_bytes, layer_span, omitted)


class _OwnerBuckets:
    """The buckets of one owner, the last of which is being filled."""

    def __init__(self, owner: int, capacity: int) -> None:
        self.owner, self.capacity = owner, capacity
        self.closed: list[Bucket] = []
        self._pieces: list[BucketSlice] = []
        self._used = 0
        self._interrupted: int | None = None  # the layer of the first tensor of another owner after the first piece

    def close(self) -> None:
        """End the current bucket, if it has pieces."""
        if self._pieces:
            self.closed.append(Bucket(-1, self.owner, tuple(self._pieces), _round_up(self._used, 8)))
        self._pieces, self._used, self._interrupted = [], 0, None

    def interrupt(self, layer: int) -> None:
        """Record that the next tensor of the manifest, in this layer, is another owner's."""
        if self._pieces and self._interrupted is None:
            self._interrupted = layer

    def close_before(self, layer: int, layer_span: int) -> None:
        """End the current bucket if a tensor of this layer would exceed the span."""
        if self._interrupted is not None and layer >= self._interrupted + layer_span:
            self.close()

    def add(self, number: int, nbytes: int) -> None:
        """Add a whole tensor, or split it over buckets of its own if it is larger than a bucket."""
        offset = _round_up(self._used, ALIGNMENT)
        if offset + nbytes > self.capacity:
            self.close()
            offset = 0
        start = 0
        while nbytes - start > self.capacity:
            self._pieces, self._used = [BucketSlice(number, start, 0, self.capacity)], self.capacity
            start += self.capacity
            self.close()
        self._pieces.append(BucketSlice(number, start, offset, nbytes - start))
        self._used = offset + nbytes - start
        if start:
            # A split tensor shares no bucket: its receiver releases the bucket's memory before it loads the tensor.
            self.close()


def _pack(
    specs: Sequence[TensorSpec], bucket_bytes: int, layer_span: int | None, left_out: Collection[str]
) -> tuple[Bucket, ...]:
    capacity = (bucket_bytes - TRAILER_BYTES) // ALIGNMENT * ALIGNMENT
    if capacity < ALIGNMENT:
        minimum = ALIGNMENT + TRAILER_BYTES
        raise ValueError(f"bucket size of {bucket_bytes} bytes is too small; use at least {minimum}")
    owners: dict[int, _OwnerBuckets] = {}
    previous: _OwnerBuckets | None = None
    for number, (spec, layer) in enumerate(zip(specs, _layers(specs), strict=True)):
        if spec.name in left_out:
            continue
        current = owners.setdefault(spec.owner, _OwnerBuckets(spec.owner, capacity))
        if previous is not None and previous is not current:
            previous.interrupt(layer)
        if layer_span is not None:
            current.close_before(layer, layer_span)
        current.add(number, spec.nbytes)
        previous = current
    for each in owners.values():
        each.close()
    buckets = [bucket for each in owners.values() for bucket in each.closed]
    buckets.sort(key=lambda bucket: bucket.pieces[0].tensor)  # stable: the pieces of a split tensor stay in order
    return tuple(replace(bucket, index=index) for index, bucket in enumerate(buckets))


def _layers(specs: Sequence[TensorSpec]) -> list[int]:
    """Return a number for each tensor, which counts the changes of layer in the manifest's order.

    The layer is the part of the name up to its first number, `model.layers.3`, or the whole name if there is none.
    """
    layers: list[int] = []
    before = None
    for spec in specs:
        parts = spec.name.split(".")
        numbers = [index for index, part in enumerate(parts) if part.isdecimal()]
        layer = parts[: numbers[0] + 1] if numbers else parts
        layers.append((layers[-1] if layers else 0) + (layer != before))
        before = layer
    return layers


def pack_manifest(plan: BucketPlan) -> str:
    """Return the plan's inputs as compressed text, for the message that brings them to an engine."""
    document = json.dumps(
        {"bucket_bytes": plan.bucket_bytes, "layer_span": plan.layer_span, "specs": _spec_rows(plan.specs)}
    )
    return base64.b85encode(zlib.compress(document.encode(), 6)).decode()


def unpack_manifest(text: str, expected_hash: str) -> BucketPlan:
    """Rebuild the plan from the text of `pack_manifest`, on the receiver.

    Raises:
        ValueError: the rebuilt plan differs from the sender's.
    """
    document = json.loads(zlib.decompress(base64.b85decode(text)))
    specs = tuple(TensorSpec(name, tuple(shape), dtype, owner) for name, shape, dtype, owner in document["specs"])
    plan = bucket_plan(specs, document["bucket_bytes"], document["layer_span"])
    if plan.hash != expected_hash:
        raise ValueError(
            f"weight-sync plans differ: sender {expected_hash}, receiver {plan.hash}; "
            "trainer and engine must run the same version of megarl"
        )
    return plan


def _spec_rows(specs: Sequence[TensorSpec]) -> list[list[object]]:
    return [[spec.name, list(spec.shape), spec.dtype, spec.owner] for spec in specs]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# The order of all gathers and broadcasts, equal on all ranks.
#
# An owner has two buffers for its own buckets. The first gathers come before all broadcasts: their buckets are
# *staged*, while the engines still generate. Then the buckets are broadcast in the plan's order, and after each
# broadcast its owner's next bucket is gathered.

BUFFERS = 2  # of an owner: one is gathered while the other one is broadcast


@dataclass(frozen=True)
class Operation:
    """The gather of a bucket on its owner, or its broadcast to all members."""

    kind: Literal["gather", "broadcast"]
    bucket: Bucket


Order: TypeAlias = tuple[Operation, ...]


def schedule(plan: BucketPlan) -> Order:
    """Return the order of operations.

    First come the gathers of each owner's first own bucket, or of all if there is a buffer for each. Then come all
    broadcasts in the plan's order. Each is followed by the gather of its owner's next bucket, which is written while
    this broadcast runs. Its buffer is free when all broadcasts before this one have ended.
    """
    own: dict[int, list[Bucket]] = {}
    numbers: list[int] = []  # of each bucket among those of its owner
    for bucket in plan.buckets:
        mine = own.setdefault(bucket.owner, [])
        numbers.append(len(mine))
        mine.append(bucket)
    staged = {owner: len(mine) if len(mine) <= BUFFERS else BUFFERS - 1 for owner, mine in own.items()}
    order = [
        Operation("gather", bucket)
        for bucket, number in zip(plan.buckets, numbers, strict=True)
        if number < staged[bucket.owner]
    ]
    for bucket, number in zip(plan.buckets, numbers, strict=True):
        order.append(Operation("broadcast", bucket))
        following = own[bucket.owner][number + staged[bucket.owner] :]
        order += [Operation("gather", each) for each in following[:1]]
    return tuple(order)
