"""The order of all gathers and broadcasts of a weight sync, equal on all ranks. Pure.

An owner has a ring of buffers for its own buckets. The first gathers come before all broadcasts: their buckets are
*staged*, while the engines still generate. Then the buckets are broadcast in the plan's order, and after each broadcast
its owner's next bucket is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from megarl.weights.plan.buckets import Bucket, BucketPlan

BUFFERS = 2  # of an owner: one is gathered while the other one is broadcast


@dataclass(frozen=True)
class Operation:
    """The gather of a bucket on its owner, or its broadcast to all members."""

    kind: Literal["gather", "broadcast"]
    bucket: Bucket


Order: TypeAlias = tuple[Operation, ...]


def ring_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the bytes of each buffer of a ring for own buckets of these sizes: those of the largest one in it."""
    return [max(sizes[place::BUFFERS]) for place in range(min(BUFFERS, len(sizes)))]


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
