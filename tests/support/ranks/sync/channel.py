"""A thread on each rank that takes batches over its own groups, while the main thread uses the training ones."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.common.errors import BatchNotReady, RolloutError
from megarl.common.trust.object_collectives import JSON, TEXT
from megarl.config.schema import TimeoutsConfig
from megarl.run.ranks.control_group import BatchChannel, ChannelClosed
from megarl.run.ranks.failure import PeerFailedError
from megarl.trainer import parallel
from tests.support.ranks.models.layouts import make_layout, use_layout

WAIT_S = 30.0


@contextmanager
def opened(layout: dict[str, Any], **timeouts: float) -> Iterator[BatchChannel]:
    with use_layout(make_layout(**layout)):
        channel = BatchChannel(TimeoutsConfig(**timeouts))
        try:
            yield channel
        finally:
            groups = [channel._peers.group, channel._replica]
            for group in groups:
                if group is not None:
                    torch.distributed.destroy_process_group(group)


def in_thread(function: Callable[[], Any]) -> Any:
    return ThreadPoolExecutor(1).submit(function)


def alongside_training(layout: dict[str, Any]) -> dict[str, Any]:
    """Return what a thread gets from its channel while the main thread reduces over the training groups."""
    rank, bounds, done = torch.distributed.get_rank(), [], threading.Event()

    def ask(bound_s: float) -> str:
        bounds.append(bound_s)
        if len(bounds) < 3:
            raise BatchNotReady("not yet")
        return f"asked by rank {rank}"

    def work() -> list[Any]:
        try:
            first = channel.wait(ask, JSON)
            shares = [channel.in_replica(f"from {rank}" if parallel.is_leader() else None, TEXT) for _ in range(20)]
            hashes = channel.gather(f"plan of {parallel.dp_rank()}")
            return [first, set(shares), set(hashes)]
        finally:
            done.set()

    with opened(layout) as channel:
        found = in_thread(work)
        sums = []
        for number in range(200):
            value = torch.tensor([float(number)])
            torch.distributed.all_reduce(value, group=parallel_state.get_model_parallel_group())
            torch.distributed.all_reduce(value)
            sums.append(value.item())
        return {"found": found.result(WAIT_S), "sums": sums, "bounds": bounds}


def hurried(bound_s: float) -> dict[str, Any]:
    """The end of a wait that is hurried after its first question, and the bounds of its questions and the next's."""
    asked, bounds = threading.Event(), []

    def ask(bound: float) -> str:
        bounds.append(bound)
        asked.set()
        raise BatchNotReady("1 group in flight")

    with opened({}, generate_s=bound_s) as channel:
        found = in_thread(lambda: channel.wait(ask, JSON))
        if torch.distributed.get_rank() == 0:
            assert asked.wait(WAIT_S)
            channel.hurry()
        error = found.exception(WAIT_S)
        channel.relax()
        again = in_thread(lambda: channel.wait(lambda bound: (bounds.append(bound), "ready")[1], JSON))
        assert again.result(WAIT_S) == "ready"
        return {"error": f"{type(error).__name__}: {error}", "bounds": bounds}


def closed_in_a_hurry() -> list[float]:
    """The bounds of a wait that is hurried from its beginning, and closed during its first question."""
    bounds: list[float] = []

    def ask(bound_s: float) -> str:
        bounds.append(bound_s)
        channel.close()
        raise BatchNotReady("not yet")

    with opened({}) as channel:
        channel.hurry()
        error = in_thread(lambda: channel.wait(ask, JSON)).exception(WAIT_S)
        assert isinstance(error, ChannelClosed | PeerFailedError)
        return bounds


def ended(how: str) -> str:
    """The exception of each rank's thread when rank 0 closes the channel, or when its question fails."""

    def ask(bound_s: float) -> str:
        if how == "failure":
            raise RolloutError("no engine is left")
        raise BatchNotReady("not yet")

    with opened({}) as channel:
        found = in_thread(lambda: channel.wait(ask, JSON))
        if how == "close" and torch.distributed.get_rank() == 0:
            channel.close()
        error = found.exception(WAIT_S)
        return f"{type(error).__name__}: {error}"
