"""Buckets are built in place: every byte of every tensor, zeros between them, and little host time per tensor."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.models.hf.gather import _Copies
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import TensorSpec, bucket_plan
from megarl.weights.plan.digest import digest
from tests.support.engines.fake_engines import ListExporter
from tests.support.measures.operations import CountOperations

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64, "uint8": torch.uint8}
shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
tensor_lists = st.lists(st.tuples(shapes, st.sampled_from(sorted(DTYPES)), st.integers(0, 1)), min_size=1, max_size=12)


def make_tensors(rows: list[tuple[tuple[int, ...], str, int]]) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"t{number}": torch.randint(0, 100, shape, generator=generator).to(DTYPES[dtype])
        for number, (shape, dtype, _) in enumerate(rows)
    }
    return tensors, {f"t{number}": owner for number, (_, _, owner) in enumerate(rows)}


@settings(max_examples=150, deadline=None)
@given(tensor_lists, st.integers(40, 400))
def test_the_buckets_hold_every_tensor_and_zeros_elsewhere(
    rows: list[tuple[tuple[int, ...], str, int]], bucket_bytes: int
) -> None:
    """Tensors larger than a bucket are cut anywhere, also inside a row."""
    tensors, owners = make_tensors(rows)
    for rank in (0, 1):
        exporter = ListExporter(tensors, rank, lambda name: owners[name])
        plan = bucket_plan(exporter.manifest(), bucket_bytes)
        packer = BucketPacker(plan, rank, CPU)
        for buffer_B in packer._buffers:
            buffer_B.fill_(255)  # what an earlier bucket has left there
        gathers = exporter.gathers(packer.requests(), CPU)
        contents = [tensors[spec.name].reshape(-1).view(torch.uint8) for spec in plan.specs]
        for bucket, gather in zip(plan.buckets, gathers, strict=True):
            assert (gather is not None) == (bucket.owner == rank)
            if gather is None:
                continue
            gather.copy()
            value = packer.seal(bucket, version=3)
            expected_B = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            for piece in bucket.pieces:
                content_B = contents[piece.tensor][piece.start : piece.start + piece.nbytes]
                expected_B[piece.offset : piece.offset + piece.nbytes] = content_B
            wire_B = packer.wire(bucket)
            assert torch.equal(wire_B[: bucket.nbytes], expected_B)
            assert (
                value == int(digest(expected_B, version=3, bucket=bucket.index)) == int(wire_B[-8:].view(torch.int64))
            )


def test_the_memory_is_two_buckets_one_for_others_and_the_rows_of_one_split_piece() -> None:
    specs = [TensorSpec("large", (1000, 33), "float32", 0), TensorSpec("other", (10, 10), "float32", 1)]
    plan = bucket_plan(specs, 4096)
    packer = BucketPacker(plan, 0, CPU)
    assert [buffer.numel() for buffer in packer._buffers] == [plan.buffer_bytes] * 2
    assert packer.scratch_B.numel() == plan.buckets[-1].wire_bytes
    assert packer._rows_B.numel() <= plan.buffer_bytes + 2 * 33 * 4


def test_each_buffer_is_as_large_as_its_largest_bucket() -> None:
    """Each tensor but the last two has a bucket of its own; the buckets take the buffers in turn."""
    sizes = [900, 500, 800, 700, 600, 30, 40]
    specs = [TensorSpec(f"t{number}", (size,), "float32", 0) for number, size in enumerate(sizes)]
    plan = bucket_plan(specs, 4096)
    wire = [bucket.wire_bytes for bucket in plan.buckets]
    assert wire == [4 * size + 8 for size in (900, 500, 800, 700)] + [4 * 672 + 8]
    assert [each.numel() for each in BucketPacker(plan, 0, CPU)._buffers] == [wire[0], wire[3]]


def test_packing_makes_a_few_operations_per_bucket_however_many_tensors_it_has() -> None:
    """Each operation costs host time, of which a sync of thousands of small tensors would consist."""
    exporter = ListExporter({f"t{number}": torch.full((8,), float(number)) for number in range(5_000)})
    plan = bucket_plan(exporter.manifest(), 16 * 1024)
    packer = BucketPacker(plan, 0, CPU)
    sources = list(exporter.tensors.values())
    lists = [
        _Copies([(target, sources[rows.tensor]) for target, rows in zip(request.targets, request.rows, strict=True)])
        for request in packer.requests()
    ]
    with CountOperations() as counter:
        for copies, bucket in zip(lists, plan.buckets, strict=True):
            copies.run()
            packer.seal(bucket, version=1)
    assert counter.operations <= 40 * len(plan.buckets) < 5_000 / 5
