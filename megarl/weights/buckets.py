"""The plan of a weight sync: which bytes of which tensor are in which bucket, and which rank sends the bucket.

Pure arithmetic on names, shapes and dtypes: every member computes the same plan from the same manifest, and compares
the plan's hash instead of receiving the plan. Invariants (property-tested): every byte of every tensor is in exactly
one piece; a bucket has one owner; a bucket and its trailer fit into `bucket_bytes`; pieces follow the manifest's order,
so a receiver can load layer by layer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

ALIGNMENT = 16  # bytes: any dtype can be viewed in place, and no int64 word contains bytes of two pieces
TRAILER_BYTES = 8  # one int64 digest after the payload
ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class ManifestEntry(Protocol):
    """An entry of `HFExporter.manifest()`; `dtype` is a torch dtype or its name."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def owner(self) -> int: ...


@dataclass(frozen=True)
class TensorSpec:
    """One Hugging Face tensor as it is sent. `owner` is the global trainer rank that sends it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    owner: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


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

    @property
    def owners(self) -> list[int]:
        """The trainer ranks that send, in ascending order."""
        return sorted({spec.owner for spec in self.specs})

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without gaps and trailers."""
        return sum(spec.nbytes for spec in self.specs)

    def is_split(self, bucket: Bucket) -> bool:
        """Tell whether the bucket holds a part of a tensor larger than a bucket; it then holds nothing else."""
        return any(piece.nbytes < self.specs[piece.tensor].nbytes for piece in bucket.pieces)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the largest broadcast."""
        return max((bucket.wire_bytes for bucket in self.buckets), default=TRAILER_BYTES)

    @cached_property
    def hash(self) -> str:
        """A hash of the whole plan, by which members check that their plans are equal."""
        rows = [[b.owner, b.nbytes, [[p.tensor, p.start, p.offset, p.nbytes] for p in b.pieces]] for b in self.buckets]
        return hashlib.sha256(json.dumps([_spec_rows(self.specs), rows]).encode()).hexdigest()[:32]


def specs_of(manifest: Sequence[ManifestEntry]) -> tuple[TensorSpec, ...]:
    """Convert the manifest to entries of plain, serialisable fields.

    Raises:
        ValueError: a name occurs twice, or a dtype cannot be sent.
    """
    specs = []
    seen: set[str] = set()
    for entry in manifest:
        dtype = str(entry.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            known = ", ".join(sorted(ITEM_BYTES))
            raise ValueError(f"tensor {entry.name!r}: dtype {dtype} cannot be sent; known: {known}")
        if entry.name in seen:
            raise ValueError(f"tensor {entry.name!r} occurs twice in the manifest; names must be unique")
        seen.add(entry.name)
        specs.append(TensorSpec(entry.name, tuple(int(n) for n in entry.shape), dtype, int(entry.owner)))
    return tuple(specs)


def make_plan(manifest: Sequence[ManifestEntry], bucket_bytes: int) -> BucketPlan:
    """Pack the manifest, in order, into buckets of at most `bucket_bytes` (trailer included).

    A tensor that fits into one bucket is never split, so that the receiver can use it in place. A larger tensor is
    split into byte ranges of whole elements.

    Raises:
        ValueError: `bucket_bytes` is too small for one aligned element, or `specs_of` refuses the manifest.
    """
    specs = specs_of(manifest)
    return BucketPlan(specs, tuple(_pack(specs, bucket_bytes)), bucket_bytes)


def _pack(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    capacity = (bucket_bytes - TRAILER_BYTES) // ALIGNMENT * ALIGNMENT
    if capacity < ALIGNMENT:
        minimum = ALIGNMENT + TRAILER_BYTES
        raise ValueError(f"bucket size of {bucket_bytes} bytes is too small; use at least {minimum}")
    buckets: list[Bucket] = []
    pieces: list[BucketSlice] = []
    used = owner = 0

    def flush() -> None:
        nonlocal used
        if pieces:
            buckets.append(Bucket(len(buckets), owner, tuple(pieces), _round_up(used, 8)))
            pieces.clear()
        used = 0

    for number, spec in enumerate(specs):
        offset = _round_up(used, ALIGNMENT)
        fits_alone = spec.nbytes <= capacity
        # A split tensor shares no bucket: its receiver releases the bucket's memory before it loads the whole tensor.
        if spec.owner != owner or (fits_alone and offset + spec.nbytes > capacity) or not fits_alone:
            flush()
        owner = spec.owner
        start = 0
        while True:
            offset = _round_up(used, ALIGNMENT)
            size = min(spec.nbytes - start, capacity - offset)
            pieces.append(BucketSlice(number, start, offset, size))
            used, start = offset + size, start + size
            if start == spec.nbytes:
                break
            flush()
        if not fits_alone:
            flush()
    flush()
    return buckets


def pack_manifest(plan: BucketPlan) -> str:
    """Return the plan's inputs as compressed text, for the message that brings them to an engine."""
    document = json.dumps({"bucket_bytes": plan.bucket_bytes, "specs": _spec_rows(plan.specs)})
    return base64.b85encode(zlib.compress(document.encode(), 6)).decode()


def unpack_manifest(text: str, expected_hash: str) -> BucketPlan:
    """Rebuild the plan from the text of `pack_manifest`, on the receiver.

    Raises:
        ValueError: the rebuilt plan differs from the sender's.
    """
    document = json.loads(zlib.decompress(base64.b85decode(text)))
    specs = tuple(TensorSpec(name, tuple(shape), dtype, owner) for name, shape, dtype, owner in document["specs"])
    plan = BucketPlan(specs, tuple(_pack(specs, document["bucket_bytes"])), document["bucket_bytes"])
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
