"""The collectives of objects on a rank of a test world."""

from typing import Any

import torch

from megarl.common.trust.object_collectives import JSON, TEXT, all_gather, broadcast


def exchanged() -> list[Any]:
    """Return a text from every rank, and an object of the last one."""
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    return [all_gather("x" * 100 * rank, TEXT), broadcast({"from": rank} if rank == last else None, JSON, last)]
