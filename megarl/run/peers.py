"""Communication between trainer ranks besides tensors: small objects over a separate gloo group."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch

from megarl.common.timeouts import GRACE_S
from megarl.config.schema import TimeoutsConfig
from megarl.run.failure import PeerFailedError

T = TypeVar("T")


def join_peers(backend: str, timeout_s: float) -> None:
    """Call `init_process_group` for a torchrun rank, including one that torchrun has restarted.

    torch 2.13 (rendezvous.py:189) assumes a new store for every restart, but torchrun shares its rendezvous' store
    with the ranks, so a restarted rank would find the addresses of killed ones. Here every restart has keys of its
    own. On several nodes, whose agents count restarts separately, `megarl launch` makes torchrun use a new store each
    time.
    """
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        store = torch.distributed.PrefixStore(f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


class Peers:
    """All trainer ranks, joined by a gloo group for small objects.

    The time-out of the group covers the longest action of rank 0 for which the others wait.
    """

    def __init__(self, timeouts: TimeoutsConfig) -> None:
        # The start of an engine, and the replacement of one that was left in the middle of a weight sync.
        start = timeouts.node_s + timeouts.ray_start_s + 2 * timeouts.engine_start_s + 3 * timeouts.rpc_s
        longest = max(timeouts.generate_s, start, timeouts.weight_sync_s, timeouts.save_s)
        self._timeout = timedelta(seconds=longest + GRACE_S)
        self.group = torch.distributed.new_group(backend="gloo", timeout=self._timeout)
        self.rank = torch.distributed.get_rank()
        self.world = torch.distributed.get_world_size()

    @property
    def is_first(self) -> bool:
        """True on rank 0, the only rank that calls the rollout controller and writes result files."""
        return self.rank == 0

    def on_first_rank(self, function: Callable[[], T]) -> T:
        """Run `function` on rank 0 and return its result on every rank.

        Raises what `function` raised on rank 0, and PeerFailedError naming it on every other rank.
        """
        outcome: list[Any] = [None, None]  # the result, which may be of any type, and the failure's text
        failure: BaseException | None = None
        if self.is_first:
            try:
                outcome[0] = function()
            except Exception as error:
                failure, outcome[1] = error, f"{type(error).__name__}: {error}"
        torch.distributed.broadcast_object_list(outcome, src=0, group=self.group)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise PeerFailedError(f"trainer rank 0 failed: {outcome[1]}")
        return cast(T, outcome[0])

    def any(self, mine: bool) -> bool:
        """Return True on every rank if `mine` is true on one."""
        flag = torch.tensor([int(mine)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks, in rank order, on every rank."""
        everyone: list[T | None] = [None] * self.world
        torch.distributed.all_gather_object(everyone, mine, group=self.group)
        return cast(list[T], everyone)

    def subgroup(self, ranks: Sequence[int]) -> torch.distributed.ProcessGroup:
        """Form a gloo group of `ranks` with the same time-out. Collective over all ranks, members or not."""
        return torch.distributed.new_group(list(ranks), backend="gloo", timeout=self._timeout)

    def barrier(self) -> None:
        """Wait for all ranks."""
        torch.distributed.barrier(self.group)
