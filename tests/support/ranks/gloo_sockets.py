"""The sockets on which one rank listens after each of some process groups has been formed."""

from __future__ import annotations

import psutil
import torch


def counted(groups: list[list[int]]) -> list[int]:
    """Return how many more there are than before the first group."""
    before, counts, kept = _listening(), [], []
    for members in groups:
        kept.append(torch.distributed.new_group(members, backend="gloo"))
        counts.append(_listening() - before)
    torch.distributed.barrier()
    for group in kept:
        if group is not torch.distributed.GroupMember.NON_GROUP_MEMBER:
            torch.distributed.destroy_process_group(group)
    return counts


def _listening() -> int:
    return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process().net_connections("tcp"))
