"""Rows of the step `streams`: this project's weight sync on one rank while work is pending on the default stream.

A trainer rank packs, digests and broadcasts on the default stream. So a publish that begins while an update is still
running on the device must carry the update's result, and end soon after it; and a broadcast that cannot start must end
at the sync's deadline, because the host only polls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.report import Ratio
from benchmarks.smoke.rows import Where, row
from megarl.common.errors import PeerTimeout
from megarl.models.hf.gather import GatherRequest
from megarl.weights.group.stage import end_key
from megarl.weights.group.store import SyncStore
from megarl.weights.group.transport import Group, GroupMembers, await_members
from megarl.weights.plan.bucket_packer import BucketPacker
from megarl.weights.plan.buckets import BucketPlan, TensorSpec, bucket_plan, schedule
from megarl.weights.send.sync_attempt import SyncAttempt

if TYPE_CHECKING:
    from benchmarks.smoke.streams import Streams

LIMIT_S = 30.0
TENSORS = 12


class OwnRows:
    """The gather of one bucket on a rank that has all of its rows."""

    owned = True

    def __init__(self, weights: Sequence[torch.Tensor], request: GatherRequest) -> None:
        self._pairs = [
            (target, weights[rows.tensor][rows.start : rows.stop])
            for rows, target in zip(request.rows, request.targets, strict=True)
        ]

    def copy(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)

    def post(self) -> None:
        """There is nobody to receive from."""

    def done(self, timeout_s: float | None) -> bool:
        return True

    def finish(self) -> None:
        """Everything was copied."""

    def unfinished_peers(self) -> Sequence[int]:
        return ()


def rows(where: Where, streams: Streams, occupied_s: float) -> list[Ratio]:
    """Publish alone, and behind `occupied_s` seconds of work that ends by writing the weights; then miss a deadline."""
    size = 2**12 if where.tiny else 2**24  # elements of 4 bytes: 200 KiB, or 800 MiB, in all
    updated = [torch.full((size // 64, 64), float(number + 1)) for number in range(TENSORS)]
    weights = [torch.zeros_like(each, device=where.device) for each in updated]
    sources = [each.to(where.device) for each in updated]
    plan = plan_of(updated)
    slack = 5.0 if where.tiny else 1.5  # simulated streams are threads, which a busy CPU delays
    expected = digests_of(plan, updated, version=2)
    with formed_group(streams.backend) as group, streams.stream(own=False):
        packer = BucketPacker(plan, 0, where.device)
        gathers: Any = [OwnRows(weights, request) for request in packer.requests()]

        def publish(version: int) -> tuple[float, dict[int, int]]:
            attempt = SyncAttempt(group, schedule(plan), gathers, packer, 0, version)
            group.begin(version, len(plan.buckets), LIMIT_S)
            started = time.perf_counter()
            attempt.run()
            seconds = time.perf_counter() - started
            group.store.put_once(end_key(group.stage), {"status": "published"})
            return seconds, attempt.digests

        publish(0)  # the first one also allocates
        streams.synchronize()
        alone_s, _ = publish(1)
        streams.synchronize()
        streams.occupy(occupied_s)
        torch._foreach_copy_(weights, sources)
        behind_s, digests = publish(2)
        streams.synchronize()
        deadline_row = missed_deadline(streams, group, occupied_s, 2 * slack)
    wrong = sum(digests[bucket] != value for bucket, value in expected.items())
    details = {"alone_s": alone_s, "buckets": len(plan.buckets), "bytes": plan.total_bytes}
    return [
        row("publish behind pending work / that work and a publish alone", behind_s, occupied_s + alone_s,
            slack, "s", details),
        row("buckets without the bytes that the pending work wrote", float(wrong), 1.0, 0.0, ""),
        deadline_row,
    ]  # fmt: skip


def missed_deadline(streams: Streams, group: Group, deadline_s: float, bound: float) -> Ratio:
    """Wait for a broadcast behind work that is longer than the stage's deadline, and leave the group."""
    tensor = streams.tensor()
    group.begin(3, 1, deadline_s)
    streams.occupy(2 * deadline_s)  # the abort may wait for it (streams.py)
    started = time.perf_counter()
    raised = ""
    try:
        group.broadcast(tensor, 0, 0).wait()
    except PeerTimeout as error:
        raised = str(error)
    waited = time.perf_counter() - started
    group.post_abort(raised or "the deadline was not noticed")
    group.abort()
    left = time.perf_counter() - started
    streams.synchronize()
    return row("a publish's broadcast behind longer work, until the group is left / deadline", left if raised
               else float("inf"), deadline_s, bound, "s", {"raised": raised, "waited_s": waited})  # fmt: skip


def plan_of(weights: Sequence[torch.Tensor]) -> BucketPlan:
    """Return a plan of some buckets, of several tensors each."""
    specs = [TensorSpec(f"layers.{number}.weight", tuple(each.shape), "float32", 0)
             for number, each in enumerate(weights)]  # fmt: skip
    return bucket_plan(specs, 3 * specs[0].nbytes + 4096, layer_span=None)


def digests_of(plan: BucketPlan, weights: Sequence[torch.Tensor], version: int) -> dict[int, int]:
    """Return the digests that a publish of these tensors must have, computed on the CPU."""
    packer = BucketPacker(plan, 0, torch.device("cpu"))
    values = {}
    for bucket, request in zip(plan.buckets, packer.requests(), strict=True):
        OwnRows(weights, request).copy()
        values[bucket.index] = packer.seal(bucket, version)
    return values


@contextmanager
def formed_group(backend: str) -> Iterator[Group]:
    """Yield the weight sync's group with this process as its only member."""
    store = SyncStore("127.0.0.1", 0, server=True)
    members = GroupMembers(0, (0,), (), (), backend, LIMIT_S)
    group = Group(store, members, 0)
    with ThreadPoolExecutor(1) as leader:
        formed = leader.submit(await_members, store.connection(), members, LIMIT_S)
        group.join(LIMIT_S)
        formed.result()
    store.put_once(end_key(group.stage), {"formed": True})
    try:
        yield group
    finally:
        group.close()
