"""The rows of `sync_scale.py` that concern the trainer: the host time of a sender, and the requests to the store.

A sender runs one whole sync as `weights/sending.py` does, with the gathers of real mapping entries and broadcasts that
do nothing. It owns all tensors, so the gathers have no messages; what is left is what a sender's host does per tensor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from report import Ratio

if TYPE_CHECKING:  # megarl's modules are imported after `platforms.activate`
    from megarl.models.gather import TensorPart
    from megarl.models.info import ModelInfo
    from megarl.weights.buckets import BucketPlan

SENDER_BOUND = 4.0
STORE_MEMBERS = (32, 128)
STORE_CPU_S = 0.5  # of the server per sync, with the larger number of members
STORE_GROWTH = 1.3  # of the CPU time per member
STORE_BUCKETS = (5, 200)


def sender_row(name: str, config: dict[str, Any], bucket_bytes: int, runs: int) -> Ratio:
    """Time one sync of a sender that owns all tensors of the tiny `config`, against a loop of `copy_` over them."""
    from megarl.models.read_config import info_from_config
    from megarl.weights.buckets import bucket_plan
    from tests.support.manifests import manifest_of

    plan = bucket_plan(manifest_of(config, expert_parallel=1, dtype="float32"), bucket_bytes, None)
    sync = one_sender(plan, whole_parts(info_from_config(config)))
    pairs = [(torch.empty(spec.shape), torch.randn(spec.shape)) for spec in plan.specs]

    def bare() -> None:
        for target, source in pairs:
            target.copy_(source)

    seconds: dict[str, list[float]] = {"copy_": [], "sender": []}
    for function in (bare, sync):  # pages and caches
        function()
    for _ in range(runs):
        for kind, function in (("copy_", bare), ("sender", sync)):
            start = time.process_time()
            function()
            seconds[kind].append(time.process_time() - start)
    each_us = {kind: statistics.median(values) / len(plan.specs) * 1e6 for kind, values in seconds.items()}
    details = {"tensors": len(plan.specs), "buckets": len(plan.buckets)}
    details |= {f"{kind} us per tensor": round(value, 2) for kind, value in each_us.items()}  # type: ignore[misc]
    return Ratio(f"sender {name}", each_us["sender"] / each_us["copy_"], SENDER_BOUND, details=details)


def whole_parts(info: ModelInfo) -> dict[int, TensorPart]:
    """Return the Hugging Face tensors of a rank that holds the whole model, in Megatron's fused parameters."""
    from megarl.models.gather import TensorPart
    from megarl.models.shards import Shard, table

    parts: dict[int, TensorPart] = {}
    for entry in table(info).values():
        shard = Shard(entry.megatron, torch.nn.Parameter(torch.randn(entry.shard_shape(0, 1))), entry, 0, 1)
        for source in range(len(entry.names)):
            parts[len(parts)] = TensorPart(shard, source, torch.float32, None)
    return parts


def one_sender(plan: BucketPlan, parts: dict[int, TensorPart]) -> Callable[[], None]:
    """Return a function that makes one sync on a sender, whose broadcasts do nothing, with a real store."""
    from megarl.models.gather import GlooWaiter, build_gathers
    from megarl.weights.bucket_packer import BucketPacker
    from megarl.weights.operation_order import schedule
    from megarl.weights.sending import Sending
    from megarl.weights.store import SyncStore
    from megarl.weights.transport import Group, GroupMembers
    from megarl.weights.watch import end_key
    from tests.support.store_traffic import NOTHING

    cpu = torch.device("cpu")
    packer = BucketPacker(plan, 0, cpu)
    gathers = build_gathers(parts, packer.requests(), cpu, GlooWaiter())
    store = SyncStore("127.0.0.1", 0, server=True)
    with patch.dict("megarl.weights.backends.BACKENDS", nothing=NOTHING):
        group = Group(store, GroupMembers(0, (0,), (), (), "nothing", 60.0), 0)
    group._backend = NOTHING.make(store.prefixed("rendezvous"), None)  # type: ignore[arg-type]  # it connects nobody
    syncs = iter(range(10**6))

    def sync() -> None:
        number = next(syncs)
        group.begin(number, len(plan.buckets), 60.0)
        sending = Sending(group, schedule(plan), gathers, packer, 0, number)
        sending.run()
        assert len(sending.digests) == len(plan.buckets)
        store.put_once(end_key(group.stage), {"status": "published"})

    return sync


def store_rows(syncs: int) -> list[Ratio]:
    """Count the requests to the sync's store and the CPU time of its server, with few and many members and buckets."""
    from tests.support.store_traffic import measure

    (small, large), (fewer, more) = STORE_MEMBERS, STORE_BUCKETS
    short, few, many = measure((small, fewer), (small, more), (large, more), syncs=syncs)
    counted = {small: few, large: many}
    requests = max(traffic.requests / (4 * members + 10) for members, traffic in counted.items())
    per_member_us = {members: traffic.cpu_s / members * 1e6 for members, traffic in counted.items()}
    facts = {f"{members} members": traffic.requests for members, traffic in counted.items()}
    times = {f"us with {members}": round(value, 1) for members, value in per_member_us.items()}
    per_sync = {"ms per sync": round(many.cpu_s * 1e3, 2)}
    return [
        Ratio("store requests", requests, 1.0, details=facts),
        Ratio("store requests per bucket", abs(few.requests - short.requests) / (more - fewer), 0.0),
        Ratio(f"store CPU, {large} members", many.cpu_s / STORE_CPU_S, 1.0, details=per_sync),
        Ratio("store CPU per member", per_member_us[large] / per_member_us[small], STORE_GROWTH, details=times),
    ]
