"""Connects the ranks that exchange messages in gathers, before the first gather.

NCCL creates the communicator of two ranks at their first message, in a call that blocks the host until both arrive.
During a weight sync that would be an unbounded wait, so each pair exchanges one number when the weight-sync group is
formed. All ranks take their pairs in one global order, which rules out deadlocks.

Tensors may have any shape.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megarl.common.errors import PeerTimeout
from megarl.common.process.threads import call_in_thread
from megarl.models.hf.gather import TensorPart


@dataclass(frozen=True)
class Pair:
    """Two global ranks of `group`: `peer` sends to `owner`. `experts`: it is the experts' group."""

    owner: int
    peer: int
    experts: bool
    group: ProcessGroup


def pairs_of(parts: Iterable[TensorPart], rank: int) -> list[Pair]:
    """Return the pairs of global rank `rank`, in the global order. Gloo groups need none."""
    groups = {id(part.group): (part.shard.entry.expert is not None, part.group) for part in parts}
    pairs = []
    for experts, group in groups.values():
        if group is None or torch.distributed.get_backend(group) == "gloo":
            continue
        owner, *peers = torch.distributed.get_process_group_ranks(group)
        pairs += [Pair(owner, peer, experts, group) for peer in peers if rank in (owner, peer)]
    return sorted(pairs, key=lambda pair: (pair.owner, pair.peer, pair.experts))


def connect_pairs(pairs: Sequence[Pair], rank: int, device: torch.device, timeout_s: float) -> None:
    """Exchange a number between the ranks of each pair. `device`: that of later messages.

    The calls run in a thread, which is abandoned if they do not return in time. Raises PeerTimeout naming a rank that
    did not connect within `timeout_s` seconds.
    """
    if not pairs:
        return
    connected: list[Pair] = []
    number = torch.cuda.current_device() if device.type == "cuda" else -1

    def connect() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(number)
        for pair in pairs:
            _exchange(pair, rank, device)
            connected.append(pair)

    call = call_in_thread(connect, name="gather-connect")
    if not wait([call], timeout_s).done:
        pair = pairs[min(len(connected), len(pairs) - 1)]
        other = pair.peer if rank == pair.owner else pair.owner
        waited = f"trainer rank {rank} waited {timeout_s:.0f} s"
        raise PeerTimeout(f"{waited} for trainer rank {other} to connect for gathers")
    call.result(0)


def _exchange(pair: Pair, rank: int, device: torch.device) -> None:
    token = torch.zeros(1, device=device)
    if rank == pair.owner:
        work = torch.distributed.irecv(token, src=pair.peer, group=pair.group)
    else:
        work = torch.distributed.isend(token, dst=pair.owner, group=pair.group)
    assert work is not None, "this rank is a member of the group"
    work.wait()
    token.item()  # on an accelerator `wait` does not block the host
