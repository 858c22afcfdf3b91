"""Measures one path from one rank; a process of its own, because NCCL reads its settings once and may hang or abort.

    python -m megarl.commands.doctor.path_probe HOST PORT PREFIX RANK SIZE BACKEND DEVICE MIB TIMEOUT_S LEADERS

Writes one JSON line per stage to stdout: `{"stage": "broadcast from node 1"}`, then `{"gb_per_second": 1.2}`. LEADERS:
comma-separated first ranks of the nodes. The parent ends this process if it does not end by itself.

Shapes: N float32 elements of a message.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
from torch import distributed

from megarl.common.bound_store import connect_store
from megarl.common.byte_units import MIB

REPEATS = 3


def operations(
    leaders: list[int], rank: int, timeout: timedelta
) -> Iterator[tuple[str, Callable[[torch.Tensor], object]]]:
    """Yield name and operation: an all-reduce over all ranks, a broadcast from each node, an all-reduce per pair.

    Pairs of neighbouring nodes show which link is slow or broken. All ranks have to call the operations in this order;
    in those of a pair the other ranks do nothing.
    """
    yield "all-reduce", distributed.all_reduce
    for node, leader in enumerate(leaders):
        yield f"broadcast from node {node}", partial(distributed.broadcast, src=leader)
    if len(leaders) < 3:
        return  # the only pair is everything
    for node in range(len(leaders)):
        pair = sorted((leaders[node], leaders[(node + 1) % len(leaders)]))
        group = distributed.new_group(pair, timeout=timeout)
        if rank in pair:
            name = f"all-reduce of nodes {node} and {(node + 1) % len(leaders)}"
            yield name, partial(distributed.all_reduce, group=group)


def measure(operation: Callable[[torch.Tensor], object], message_N: torch.Tensor) -> float:
    """Return the rate of the fastest of some repeats, in GB of payload per second, after one without timing."""
    operation(message_N)
    seconds = []
    for _ in range(REPEATS):
        message_N.fill_(1.0)
        _synchronize(message_N)
        started = time.perf_counter()
        operation(message_N)
        _synchronize(message_N)
        seconds.append(time.perf_counter() - started)
    return message_N.numel() * message_N.element_size() / min(seconds) / 1e9


def _synchronize(message_N: torch.Tensor) -> None:
    if message_N.is_cuda:
        torch.cuda.synchronize()


def _say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> None:
    """Be one rank of the probe: print one JSON line per stage and per measured operation, then end the process."""
    host, port, prefix, rank, size, backend, device, mib, timeout_s, leaders = arguments
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the parent
    timeout = timedelta(seconds=float(timeout_s))
    _say(stage="connect")
    store = connect_store(host, int(port), float(timeout_s))
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    distributed.init_process_group(
        backend, store=distributed.PrefixStore(prefix, store), rank=int(rank), world_size=int(size), timeout=timeout
    )
    message_N = torch.ones(int(float(mib) * MIB) // 4, device=where)
    first = torch.ones(1, device=where)
    distributed.all_reduce(first)
    if first.item() != float(size):
        raise RuntimeError(f"an all-reduce of ones over {size} ranks gave {first.item()}")
    for name, operation in operations([int(each) for each in leaders.split(",")], int(rank), timeout):
        _say(stage=name)
        _say(gb_per_second=measure(operation, message_N))
    _say(stage="end")
    sys.stdout.flush()
    os._exit(0)  # the groups' threads may still wait for peers that have already ended


if __name__ == "__main__":
    main(sys.argv[1:])
