"""Memory of a step, as every rank tells it."""

from __future__ import annotations

import psutil
import torch

from megarl.run.performance import GIB, peak_memory_gib

HELD_B = 300 * 2**20


def peaks() -> tuple[float, float]:
    """Rank 1 holds memory and lets go of it; then what is reported, and what this rank has now, both in GiB."""
    group = torch.distributed.new_group(backend="gloo")
    if torch.distributed.get_rank() == 1:
        torch.ones(HELD_B, dtype=torch.uint8)
    return peak_memory_gib(group), psutil.Process().memory_info().rss / GIB


def test_the_peak_is_the_highest_of_all_ranks_and_over_time(world) -> None:
    (first, resident_0), (second, resident_1) = world(2).run("tests.test_performance:peaks")
    assert first == second
    # Resident memory of rank 0, and of rank 1 by now, says nothing of what rank 1 held.
    assert first > max(resident_0, resident_1) + 0.5 * HELD_B / GIB
    assert first < resident_1 + 2 * HELD_B / GIB
