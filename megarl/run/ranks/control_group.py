"""Communication of small objects between trainer ranks, over a separate gloo group."""

import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed import TCPStore

from megarl.common.clocks import GRACE_S
from megarl.common.errors import BatchNotReady, NotAuthentic, PeerTimeout
from megarl.common.trust.object_collectives import TEXT, Codec, all_gather, broadcast, codec_of, sendable
from megarl.common.trust.object_guard import guard_object_collectives
from megarl.common.trust.run_secret import run_secret
from megarl.common.trust.signed_store import connect_store, serve_store, sign, verify
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks.failure import PeerFailedError

T = TypeVar("T")

_OUTCOME: Codec[tuple[bytes, str | None]] = codec_of(tuple[bytes, str | None])
_RANKS: Codec[tuple[int, ...]] = codec_of(tuple[int, ...])


StoreAddress = tuple[str, int]  # host and port
LATER_S = 5.0  # other ranks wait this much longer than rank 0, which can name missing ranks


def join_peers(backend: str, timeout_s: float, run_dir: Path) -> StoreAddress:
    """Call `init_process_group` for a torchrun rank, also after a restart by torchrun.

    Return the address of the store of the ranks, which rank 0 serves.

    The ranks have their own store for the process group. It listens on one address and starts empty. torchrun would
    share the store of its rendezvous, which listens on all addresses and outlives a restart: restarted ranks would find
    the addresses of killed ones (torch 2.13, rendezvous.py:189).
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=timeout_s)
    store = _own_store(rank, timeout_s, run_secret(run_dir))
    guard_object_collectives()
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return store.host, store.port


def _own_store(rank: int, timeout_s: float, secret: bytes) -> TCPStore:
    """Return the store of this start of the ranks, which rank 0 serves."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        # The port is free at each start, so that only rank 0 serves the store there. The rendezvous store does not sign
        # this address, so rank 0 does, and the others never use a stranger's store. The name has no restart count: each
        # agent counts only its own ranks' failures (torch 2.13, api.py:951).
        name = f"store of the ranks/{run}"
        if rank == 0:
            store = serve_store(host, port, timeout_s)
            store.set(name, sign(secret, name, json.dumps([host, port])))
            return store
        store = connect_store(host, port, timeout_s)
        served = json.loads(verify(secret, name, store.get(name)))
        if served != [host, port]:
            raise NotAuthentic(f"rank {rank} was led to the store at {host}:{port}, but rank 0 serves it at {served}")
        return store
    # The agent serves a store there: it holds nothing of the ranks but the address of theirs, signed.
    agents = connect_store(host, port, timeout_s)
    name = f"ranks/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    if rank == 0:
        own = "127.0.0.1" if os.environ.get("GROUP_WORLD_SIZE", "1") == "1" else host
        store = serve_store(own, 0, timeout_s)
        agents.set(name, sign(secret, name, json.dumps([own, store.port])))
        return store
    host, port = json.loads(verify(secret, name, agents.get(name)))
    return connect_store(host, port, timeout_s)


class ControlGroup:
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

    def on_first_rank(self, function: Callable[[], T], codec: Codec[T]) -> T:
        """Run `function` on rank 0 and return its result, which `codec` describes, on every rank.

        Raises what `function` raised on rank 0, and PeerFailedError naming it on every other rank.
        """
        outcome: tuple[bytes, str | None] = (b"", None)  # the result, and the failure's text
        failure: BaseException | None = None
        if self.is_first:
            try:
                outcome = (codec.encode(function()), None)
            except Exception as error:
                failure, outcome = error, (b"", sendable(f"{type(error).__name__}: {error}"))
        content, problem = broadcast(outcome, _OUTCOME, 0, self.group)
        if failure is not None:
            raise failure
        if problem is not None:
            raise PeerFailedError(f"trainer rank 0 failed: {problem}")
        return codec.decode(content)

    def any(self, mine: bool) -> bool:
        """Return True on every rank if `mine` is true on one."""
        flag = torch.tensor([int(mine)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def gather(self, mine: T, codec: Codec[T]) -> list[T]:
        """Return the objects of all ranks, in rank order, on every rank."""
        return all_gather(mine, codec, self.group)

    def subgroup(self, ranks: Sequence[int]) -> torch.distributed.ProcessGroup:
        """Form a gloo group of `ranks` with the same time-out. Collective over all ranks, members or not."""
        return torch.distributed.new_group(list(ranks), backend="gloo", timeout=self._timeout)

    def await_all(self, what: str, timeout_s: float, key: str, holds: Sequence[str] = ()) -> None:
        """Wait until all ranks have called this. `what`: what they have done; `key`: the config's key of the bound.

        `holds`: what each rank held before, for the message. After `timeout_s` seconds raises PeerTimeout that names
        the missing ranks; PeerFailedError on other ranks than 0.
        """
        limit_s = timeout_s if self.is_first else timeout_s + LATER_S
        try:
            torch.distributed.monitored_barrier(self.group, timedelta(seconds=limit_s), wait_all_ranks=True)
        except RuntimeError as error:
            # Of ProcessGroupGloo.cpp. Rank 0 names the others, and is named by them if it does not come itself.
            late = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
            missing = late[1] if late else "0" if "imed out" in str(error) else None
            if missing is None:
                raise PeerFailedError(f"a rank has failed that was to {what}: {error}") from error
            if holds:
                missing = ", ".join(f"{rank} (which held {holds[int(rank)]})" for rank in missing.split(", "))
            waited = f"trainer rank {self.rank} waited {limit_s:.0f} s ({key}) for trainer rank {missing} to {what}"
            raise PeerTimeout(waited) from error


# How often a rank that waits for a batch checks for a stop request, and shows the others that it waits.
SLICE_S = 2.0
LEAST_S = 0.05  # the shortest request, if a bound has nearly passed


class ChannelClosed(Exception):  # noqa: N818
    """The wait was ended by `close`."""


class BatchChannel:
    """The collectives by which ranks take a batch: gloo groups of all ranks, and of each replica.

    The groups are separate because a thread uses them during training. All ranks must call the collectives of a group
    in the same order, and training calls those of its own communicators all the time.

    A wait for a batch may begin long before the trainer needs it. Its bound, `timeouts.generate_s`, counts from the
    call of `hurry`. Rank 0 asks in slices, and the other ranks follow each slice. So no rank exceeds the time-out of a
    collective, and `close` ends the wait within `SLICE_S`: `ray.shutdown` finds no thread that waits in Ray.
    """

    def __init__(self, timeouts: TimeoutsConfig) -> None:
        """Form the groups. Collective over all ranks, in the main thread, with the parallel layout initialised."""
        from megarl.trainer import parallel  # it imports Megatron-Core, which takes a rank that starts too long

        self._peers = ControlGroup(timeouts)
        own = parallel.replica_ranks()
        replicas = sorted(set(self._peers.gather(tuple(own), _RANKS)))
        groups = {ranks: self._peers.subgroup(ranks) for ranks in replicas if len(ranks) > 1}
        self._leader, self._replica = own[0], groups.get(tuple(own))
        self._bound_s = timeouts.generate_s
        self._hurried_at: float | None = None
        self._closed = threading.Event()

    def hurry(self) -> None:
        """Count the bound of the current wait from now on: the trainer is idle."""
        self._hurried_at = time.monotonic()

    def relax(self) -> None:
        """Let the next wait last as long as training does."""
        self._hurried_at = None

    def close(self) -> None:
        """End the wait of every rank's thread. Needed on rank 0 only; the others follow."""
        self._closed.set()

    def wait(self, ask: Callable[[float], T], codec: Codec[T | None]) -> T:
        """Return on every rank the result of `ask` on rank 0, which asks in slices of `SLICE_S` until there is one.

        `ask` gets a bound in seconds, and raises BatchNotReady when it has passed. `codec` must also have None, which
        stands for "not yet". Raises ChannelClosed after `close`, and BatchNotReady when the bound has passed.
        """
        while True:
            result = self._peers.on_first_rank(lambda: self._ask_once(ask), codec)
            if result is not None:
                return result

    def _ask_once(self, ask: Callable[[float], T]) -> T | None:
        if self._closed.is_set():
            raise ChannelClosed("the run stops")
        hurried_at = self._hurried_at
        left = math.inf if hurried_at is None else self._bound_s - (time.monotonic() - hurried_at)
        try:
            return ask(min(SLICE_S, max(left, LEAST_S)))
        except BatchNotReady as error:
            if left > SLICE_S:
                return None
            waited = f"the trainer waited {self._bound_s:.0f} s (timeouts.generate_s) for its batch"
            raise BatchNotReady(f"{waited}; at last, {error}") from None

    def in_replica(self, own: T | None, codec: Codec[T]) -> T:
        """Return the leader's `own` on every rank of its replica."""
        if self._replica is None:
            return own  # type: ignore[return-value]
        return broadcast(own, codec, self._leader, self._replica)

    def gather(self, own: str) -> Sequence[str]:
        """Return the texts of all ranks."""
        return self._peers.gather(own, TEXT)
