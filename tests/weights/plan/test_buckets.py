"""The plan: every byte once, one owner per bucket, nothing above the bucket size."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.hf.read_config import load_info
from megarl.models.megatron.shards import table
from megarl.weights.plan.buckets import (
    ALIGNMENT,
    RELOAD_LAYER_SPAN,
    TensorSpec,
    bucket_plan,
    itemsize,
    pack_manifest,
    specs_of,
    unpack_manifest,
)
from tests.support.checkout import ROOT

DTYPES = ["float32", "bfloat16", "int64", "uint8"]
shapes = st.lists(st.integers(0, 17), min_size=0, max_size=3).map(tuple)


@st.composite
def manifests(draw: st.DrawFn) -> list[TensorSpec]:
    """Tensors of up to eight layers and of none, in the order of layers, of four owners in any order."""
    rows = draw(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.integers(0, 3)), max_size=40))
    layers = sorted(draw(st.lists(st.integers(-1, 6), min_size=len(rows), max_size=len(rows))))
    names = [f"t{i}.weight" if layer < 0 else f"layers.{layer}.t{i}.7" for i, layer in enumerate(layers)]
    return [TensorSpec(name, *row) for name, row in zip(names, rows, strict=True)]


sizes = st.integers(24, 4096)
spans = st.sampled_from([1, 2, 3, None])


@settings(max_examples=300, deadline=None)
@given(manifests(), sizes, spans, st.sampled_from([0, 1, 3]))
def test_every_byte_is_in_exactly_one_piece(
    specs: list[TensorSpec], bucket_bytes: int, span: int | None, without: int
) -> None:
    """`without`: one tensor of so many is left out; 0: none."""
    left_out = {spec.name for spec in specs[::without]} if without else set()
    plan = bucket_plan(specs, bucket_bytes, span, left_out)
    covered: dict[int, list[tuple[int, int]]] = {i: [] for i in range(len(specs))}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            covered[piece.tensor].append((piece.start, piece.nbytes))
    assert plan.total_bytes == sum(spec.nbytes for spec in specs if spec.name not in left_out)
    assert left_out == set() or plan.hash != bucket_plan(specs, bucket_bytes, span).hash
    for number, spec in enumerate(specs):
        position = 0
        if spec.name in left_out:
            assert not covered[number], "a tensor that is left out is in a bucket"
            continue
        assert covered[number], f"{spec} is in no bucket"
        for start, nbytes in covered[number]:  # in wire order: contiguous, ascending
            assert start == position
            position += nbytes
        assert position == math.prod(spec.shape) * itemsize(spec.dtype)


@settings(max_examples=300, deadline=None)
@given(manifests(), sizes, spans)
def test_buckets_have_one_owner_fit_and_do_not_overlap(
    specs: list[TensorSpec], bucket_bytes: int, span: int | None
) -> None:
    first = []
    for index, bucket in enumerate(bucket_plan(specs, bucket_bytes, span).buckets):
        assert bucket.index == index
        assert bucket.wire_bytes <= bucket_bytes and bucket.nbytes % 8 == 0
        end = 0
        for piece in bucket.pieces:
            assert specs[piece.tensor].owner == bucket.owner
            assert piece.offset >= end and piece.offset % ALIGNMENT == 0
            assert piece.start % itemsize(specs[piece.tensor].dtype) == 0
            end = piece.offset + piece.nbytes
        order = [piece.tensor for piece in bucket.pieces]
        assert order == sorted(order), "within a bucket tensors follow the manifest"
        assert end <= bucket.nbytes < end + 8
        first.append((order[0], bucket.pieces[0].start))
    assert first == sorted(first), "buckets follow the position of their first tensor"


@settings(max_examples=300, deadline=None)
@given(manifests(), sizes, st.sampled_from([1, 2, 3]))
def test_few_layers_are_incomplete_at_one_time(specs: list[TensorSpec], bucket_bytes: int, span: int) -> None:
    """vLLM's reload keeps the tensors of incomplete layers: all that come too early belong to `span` layers."""
    plan = bucket_plan(specs, bucket_bytes, span)
    layers = [".".join(spec.name.split(".")[:2]) for spec in specs]
    numbers = list(itertools.accumulate(range(1, len(specs)), lambda n, i: n + (layers[i] != layers[i - 1]), initial=0))
    missing = {i: spec.nbytes for i, spec in enumerate(specs)}
    for bucket in plan.buckets:
        for piece in bucket.pieces:
            missing[piece.tensor] -= piece.nbytes
            if not missing[piece.tensor]:
                del missing[piece.tensor]
        gap = min((i for i in missing if specs[i].nbytes), default=len(specs))
        early = [i for i in range(gap, len(specs)) if i not in missing and specs[i].nbytes]
        assert all(numbers[i] < numbers[gap] + span for i in early)


@settings(max_examples=300, deadline=None)
@given(manifests(), sizes)
def test_without_a_limit_an_owner_fills_its_buckets(specs: list[TensorSpec], bucket_bytes: int) -> None:
    """A bucket ends only where the next tensor of its owner does not fit, or where one of the two is split."""
    plan = bucket_plan(specs, bucket_bytes, None)
    for owner in plan.owners:
        own = [bucket for bucket in plan.buckets if bucket.owner == owner]
        for bucket, after in itertools.pairwise(own):
            used = bucket.pieces[-1].offset + bucket.pieces[-1].nbytes
            added = -(-used // ALIGNMENT) * ALIGNMENT + specs[after.pieces[0].tensor].nbytes
            assert added > bucket_bytes - 8 - ALIGNMENT or plan.is_split(bucket) or plan.is_split(after)


@settings(max_examples=100, deadline=None)
@given(manifests(), sizes, spans)
def test_what_fits_into_one_bucket_is_not_split(specs: list[TensorSpec], bucket_bytes: int, span: int | None) -> None:
    plan = bucket_plan(specs, bucket_bytes, span)
    pieces = [p for b in plan.buckets for p in b.pieces]
    for number, spec in enumerate(specs):
        if spec.nbytes <= (bucket_bytes - 8) // ALIGNMENT * ALIGNMENT:
            assert sum(p.tensor == number for p in pieces) == 1
    for bucket in plan.buckets:
        assert not plan.is_split(bucket) or len(bucket.pieces) == 1, "a split tensor shares no bucket"


def manifest_of_experts(expert_parallel: int) -> list[TensorSpec]:
    """Return the manifest of Qwen3-30B-A3B: rank 0 owns what is not an expert, rank i the i-th part of the experts."""
    info = load_info(ROOT / "examples" / "rl" / "models" / "Qwen3-30B-A3B-Base")
    per_rank = (info.num_experts or 1) // expert_parallel
    return [
        TensorSpec(name, shape, "bfloat16", 0 if entry.expert is None else entry.expert // per_rank)
        for entry in table(info).values()
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    ]


@pytest.mark.parametrize("size", [512 * 2**20, 64 * 2**20])
def test_experts_on_many_ranks_fill_buckets(size: int) -> None:
    """Under EP8 Qwen3-30B-A3B fills its buckets where the engine loads in place, and does not where it reloads."""
    specs = manifest_of_experts(8)
    assert len(specs) == 18_867
    in_place = bucket_plan(specs, size, None)
    assert statistics.median(bucket.nbytes for bucket in in_place.buckets) >= 0.9 * size
    reload = bucket_plan(specs, size, RELOAD_LAYER_SPAN)
    assert in_place.total_bytes == reload.total_bytes and in_place.hash != reload.hash
    assert in_place.owners == reload.owners == list(range(8))


def test_one_owner_needs_no_limit() -> None:
    """Its layers arrive one after the other, so both kinds of engine get the same buckets."""
    specs = manifest_of_experts(1)
    assert bucket_plan(specs, 2**29, 1).buckets == bucket_plan(specs, 2**29, None).buckets


@settings(max_examples=50, deadline=None)
@given(manifests(), sizes, spans)
def test_the_receiver_rebuilds_the_same_plan(specs: list[TensorSpec], bucket_bytes: int, span: int | None) -> None:
    plan = bucket_plan(specs, bucket_bytes, span)
    assert unpack_manifest(pack_manifest(plan), plan.hash) == plan


def test_another_plan_is_refused() -> None:
    plan = bucket_plan([TensorSpec("a", (4, 4), "float32", 0)], 1024)
    other = bucket_plan([TensorSpec("a", (4, 4), "float32", 1)], 1024)
    assert len({plan.hash, other.hash, bucket_plan([TensorSpec("a", (4, 4), "float32", 0)], 1024, None).hash}) == 3
    with pytest.raises(ValueError, match="plans differ"):
        unpack_manifest(pack_manifest(plan), other.hash)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="too small"):
        bucket_plan([], 23)
    with pytest.raises(ValueError, match="occurs twice"):
        specs_of([TensorSpec("a", (1,), "float32", 0), TensorSpec("a", (1,), "float32", 0)])
    with pytest.raises(ValueError, match="complex64"):
        specs_of([TensorSpec("a", (1,), "complex64", 0)])
    with pytest.raises(ValueError, match="tensors to leave out that are not in the plan: 1, such as b"):
        bucket_plan([TensorSpec("a", (4, 4), "float32", 0)], 1024, left_out=["b"])


def test_torch_dtypes_are_accepted() -> None:
    entry = TensorSpec("a", (3,), torch.bfloat16, 0)  # type: ignore[arg-type]
    assert specs_of([entry])[0] == TensorSpec("a", (3,), "bfloat16", 0)
