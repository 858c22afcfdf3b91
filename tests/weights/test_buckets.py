"""The plan: every byte once, one owner per bucket, nothing above the bucket size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.weights.buckets import (
    ALIGNMENT,
    ITEM_BYTES,
    TensorSpec,
    make_plan,
    pack_manifest,
    specs_of,
    unpack_manifest,
)

DTYPES = ["float32", "bfloat16", "int64", "uint8"]
shapes = st.lists(st.integers(0, 17), min_size=0, max_size=3).map(tuple)
manifests = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.integers(0, 3)), min_size=0, max_size=25).map(
    lambda rows: [TensorSpec(f"t{i}", s, d, o) for i, (s, d, o) in enumerate(rows)]
)
sizes = st.integers(24, 4096)


@settings(max_examples=300, deadline=None)
@given(manifests, sizes)
def test_every_byte_is_in_exactly_one_piece(specs: list[TensorSpec], bucket_bytes: int) -> None:
    covered = {i: [] for i in range(len(specs))}
    for bucket in make_plan(specs, bucket_bytes).buckets:
        for piece in bucket.pieces:
            covered[piece.tensor].append((piece.start, piece.nbytes))
    for number, spec in enumerate(specs):
        position = 0
        assert covered[number], f"{spec} is in no bucket"
        for start, nbytes in covered[number]:  # in wire order: contiguous, ascending
            assert start == position
            position += nbytes
        assert position == math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


@settings(max_examples=300, deadline=None)
@given(manifests, sizes)
def test_buckets_have_one_owner_fit_and_do_not_overlap(specs: list[TensorSpec], bucket_bytes: int) -> None:
    order = []
    for index, bucket in enumerate(make_plan(specs, bucket_bytes).buckets):
        assert bucket.index == index
        assert bucket.wire_bytes <= bucket_bytes and bucket.nbytes % 8 == 0
        end = 0
        for piece in bucket.pieces:
            assert specs[piece.tensor].owner == bucket.owner
            assert piece.offset >= end and piece.offset % ALIGNMENT == 0
            assert piece.start % ITEM_BYTES[specs[piece.tensor].dtype] == 0
            end = piece.offset + piece.nbytes
            order.append(piece.tensor)
        assert end <= bucket.nbytes < end + 8
    assert order == sorted(order), "pieces must follow the manifest: the receiver loads layer by layer"


@settings(max_examples=100, deadline=None)
@given(manifests, sizes)
def test_what_fits_into_one_bucket_is_not_split(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = make_plan(specs, bucket_bytes)
    pieces = [p for b in plan.buckets for p in b.pieces]
    for number, spec in enumerate(specs):
        if spec.nbytes <= (bucket_bytes - 8) // ALIGNMENT * ALIGNMENT:
            assert sum(p.tensor == number for p in pieces) == 1
    for bucket in plan.buckets:
        assert not plan.is_split(bucket) or len(bucket.pieces) == 1, "a split tensor shares no bucket"


@settings(max_examples=50, deadline=None)
@given(manifests, sizes)
def test_the_receiver_rebuilds_the_same_plan(specs: list[TensorSpec], bucket_bytes: int) -> None:
    plan = make_plan(specs, bucket_bytes)
    assert unpack_manifest(pack_manifest(plan), plan.hash) == plan


def test_another_plan_is_refused() -> None:
    plan = make_plan([TensorSpec("a", (4, 4), "float32", 0)], 1024)
    other = make_plan([TensorSpec("a", (4, 4), "float32", 1)], 1024)
    assert plan.hash != other.hash
    with pytest.raises(ValueError, match="plans differ"):
        unpack_manifest(pack_manifest(plan), other.hash)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="too small"):
        make_plan([], 23)
    with pytest.raises(ValueError, match="occurs twice"):
        specs_of([TensorSpec("a", (1,), "float32", 0), TensorSpec("a", (1,), "float32", 0)])
    with pytest.raises(ValueError, match="complex64"):
        specs_of([TensorSpec("a", (1,), "complex64", 0)])


def test_torch_dtypes_are_accepted_and_sized_right() -> None:
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size
    entry = TensorSpec("a", (3,), torch.bfloat16, 0)  # type: ignore[arg-type]
    assert specs_of([entry])[0] == TensorSpec("a", (3,), "bfloat16", 0)
