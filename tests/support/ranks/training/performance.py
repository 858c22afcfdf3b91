"""The memory of a step, where one of two ranks has held much for a while."""

import psutil
import torch

from megarl.common.values import GIB
from megarl.run.record.batch_metrics import peak_memory_gib

HELD_B = 300 * 2**20


def peaks() -> tuple[float, float]:
    """Rank 1 holds memory and lets go of it; then what is reported, and what this rank has now, both in GiB."""
    group = torch.distributed.new_group(backend="gloo")
    if torch.distributed.get_rank() == 1:
        torch.ones(HELD_B, dtype=torch.uint8)
    return peak_memory_gib(group), psutil.Process().memory_info().rss / GIB
