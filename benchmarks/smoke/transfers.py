"""Steps `digest` and `export`: what a weight sync computes on the device before it sends.

Shape suffixes: B bytes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.lib.report import Ratio
from benchmarks.smoke import models
from benchmarks.smoke.rows import Where, row

if TYPE_CHECKING:
    from megarl.weights.plan.buckets import Bucket

REPEATS = 5


def median_s(where: Where, function: Callable[[], object], repeats: int = REPEATS, warm_up: int = 1) -> float:
    """Return the median seconds of `repeats` calls, after `warm_up` that are not counted."""
    for _ in range(warm_up):
        function()
    seconds = []
    for _ in range(repeats):
        where.synchronize()
        started = time.perf_counter()
        function()
        where.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def digest_step(where: Where) -> tuple[list[Ratio], list[str]]:
    """Compare the digest of a bucket on the device with that on the CPU, and its time with a copy of the bucket."""
    from megarl.weights.plan.digest import digest

    nbytes = (8 if where.tiny else 512) * 2**20 + 24  # a row that is not full, too
    host_B = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    device_B = host_B.to(where.device)
    expected = int(digest(host_B, version=3, bucket=5))
    changed_B = device_B.clone()
    changed_B[nbytes // 2] += 1
    changed = int(digest(changed_B, version=3, bucket=5))
    wrong = (int(digest(device_B, version=3, bucket=5)) != expected) + (changed == expected)
    seconds = median_s(where, lambda: digest(device_B, version=3, bucket=5))
    copy = median_s(where, device_B.clone)
    per_gb = seconds / nbytes * 1e9
    # Each word is read twice and multiplied into a temporary: about ten passes over the data.
    return [
        row("digests that differ from the CPU's", float(wrong), 1.0, 0.0, ""),
        row("digest of a bucket / copy of a bucket", seconds, copy, 100.0 if where.tiny else 25.0, "s",
            {"seconds_per_gb": per_gb, "bytes": nbytes}),
    ], []  # fmt: skip


def export_step(where: Where) -> tuple[list[Ratio], list[str]]:
    """Export a mixture of experts from the device, pack it into buckets and compare every byte with the files."""
    from safetensors.torch import load_file

    sizes = {} if where.tiny else {"hidden_size": 1024, "moe_intermediate_size": 768, "num_experts": 32}
    with tempfile.TemporaryDirectory() as folder:
        models.small_model(Path(folder), family="moe", **sizes)
        files = {name: each for path in Path(folder).glob("*.safetensors") for name, each in load_file(path).items()}
        models.join(models.free_address(), 0, 1)
        config = models.make_config(Path(folder), trainer={"precision": "fp32"})
        with models.built_policy(config) as policy:
            from megarl.models.hf.export import HFExporter
            from megarl.weights.plan.bucket_packer import BucketPacker
            from megarl.weights.plan.buckets import bucket_plan

            exporter = HFExporter(policy.module_chunks, policy.info, torch.float32)
            plan = bucket_plan(exporter.manifest(), (1 if where.tiny else 64) * 2**20, None)
            packer = BucketPacker(plan, 0, where.device)
            gathers = exporter.gathers(packer.requests(), where.device)

            def pack(check: Callable[[Bucket], None] = lambda bucket: None) -> None:
                for bucket, gather in zip(plan.buckets, gathers, strict=True):
                    assert gather is not None  # this rank has all tensors
                    gather.copy()
                    gather.post()
                    gather.done(None)
                    gather.finish()
                    packer.seal(bucket, 1)
                    check(bucket)

            found = {spec.name: bytearray(spec.nbytes) for spec in plan.specs}

            def keep(bucket: Bucket) -> None:
                wire_B = packer.wire(bucket).cpu()
                for piece in bucket.pieces:
                    content = wire_B[piece.offset : piece.offset + piece.nbytes].numpy().tobytes()
                    found[plan.specs[piece.tensor].name][piece.start : piece.start + piece.nbytes] = content

            pack(keep)
            expected = {name: each.float().contiguous().numpy().tobytes() for name, each in files.items()}
            wrong = sum(found.get(name) != expected.get(name) for name in found.keys() | expected.keys())
            parts = [each.to(where.device) for each in files.values()]
            packing = median_s(where, pack)
            copying = median_s(where, lambda: [each.clone() for each in parts])
    total = sum(each.numel() * each.element_size() for each in files.values())
    return [
        row("exported tensors that differ from the files", float(wrong), 1.0, 0.0, "", {"tensors": len(expected)}),
        # The digest of each bucket costs about ten copies of it.
        row("gathering and packing / copies of the tensors", packing, copying, 60.0 if where.tiny else 25.0, "s",
            {"seconds_per_gb": packing / total * 1e9, "bytes": total}),
    ], []  # fmt: skip
