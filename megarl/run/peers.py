"""What trainer ranks tell each other besides tensors: small objects over a gloo group of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch

from megarl.common.timeouts import GRACE_S
from megarl.config.schema import TimeoutsConfig
from megarl.run.failure import PeerFailedError

T = TypeVar("T")


def join_peers(backend: str, timeout_s: float) -> None:
    """`init_process_group` of a torchrun rank, also of one that torchrun has started again.

    torch 2.13 (rendezvous.py:189) counts on a new store for every restart, but torchrun shares its rendezvous' store
    with the ranks: a restarted one finds the addresses of the dead. Here every restart has keys of its own. On several
    nodes, whose agents count restarts apart, `megarl launch` has torchrun make a new store each time.
    """
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = torch.distributed.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


class Peers:
    """All trainer ranks, and a gloo group of their own for small objects.

    The time-out of the group covers the longest thing that rank 0 does while the others wait.
    """

    def __init__(self, timeouts: TimeoutsConfig) -> None:
        # Starting an engine, and replacing one that the last trainer left in the middle of a sync.
        start = timeouts.node_s + timeouts.ray_start_s + 2 * timeouts.engine_start_s + 3 * timeouts.rpc_s
        longest = max(timeouts.generate_s, start, timeouts.weight_sync_s, timeouts.save_s)
        self.group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=longest + GRACE_S))
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone talks to the rollout controller and writes result files."""
        return self.rank == 0

    def on_first_rank(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0; every rank gets its result, or an error naming its failure."""
        return on_first_rank(self.group, function)

    def any(self, mine: bool) -> bool:
        """True on every rank if it is true on one."""
        flag = torch.tensor([int(mine)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def gather(self, mine: T) -> list[T]:
        """What every rank brings, in rank order, on every rank."""
        everyone: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier(self.group)


def on_first_rank(group: Any, function: Callable[[], T]) -> T:
    """Run `function` on rank 0; every rank gets its result, or an error naming its failure."""
    outcome: list[Any] = [None, None]
    failure: BaseException | None = None
    if torch.distributed.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    torch.distributed.broadcast_object_list(outcome, src=0, group=group)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise PeerFailedError(f"trainer rank 0 failed: {outcome[1]}")
    result: T = outcome[0]
    return result
