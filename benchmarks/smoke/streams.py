"""Step `streams`: the order in which a device runs collectives, kernels and copies of several threads.

The first rows test the premise under which a weight sync of two threads would deadlock, one that packs and one that
broadcasts: both use the device's default stream unless they say otherwise, and NCCL makes a collective wait for
everything before it on the caller's current stream. So a broadcast would wait for the other thread's work, which may
itself wait for the broadcast. That is why the weight sync issues everything on one thread, in one order on all ranks
(`megarl/weights/send/sync_attempt.py`). `Streams` is what this needs of a device. Tests
give it simulated ones, with NCCL's order over gloo.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch.distributed import BroadcastOptions, TCPStore, Work

from benchmarks.lib.report import Ratio
from benchmarks.smoke import publish
from benchmarks.smoke.rows import Where, row

if TYPE_CHECKING:
    from megarl.weights.group.relay import Backend

OCCUPIED_S = 0.5
POLL_S = 0.001
GIVE_UP_S = 60.0


class Streams(Protocol):
    """A device with streams, and a process group of one rank whose collectives are ordered by them."""

    def occupy(self, seconds: float) -> None:
        """Enqueue work of this duration on the current stream, and return at once."""

    def stream(self, *, own: bool) -> AbstractContextManager[object]:
        """Return a context whose current stream is the default one, or (`own`) a new one."""

    def synchronize(self) -> None:
        """Block the caller until all streams have finished."""

    def group(self, *, timeout_s: float, blocking: bool) -> Backend:
        """Return a new process group; `blocking`: its `wait()` blocks the caller and there is no watchdog."""

    def tensor(self) -> torch.Tensor:
        """Return a tensor to broadcast."""

    @property
    def backend(self) -> str:
        """The key of `megarl.weights.group.backends.BACKENDS` by which the weight sync communicates on this device."""


class CudaStreams:
    """CUDA's streams and NCCL."""

    backend = "nccl"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device.index or 0)
        for cycles in (10**9, 10**9):  # the first makes the context and raises the clocks
            started = time.perf_counter()
            torch.cuda._sleep(cycles)
            torch.cuda.synchronize()
        self._cycles_per_s = cycles / (time.perf_counter() - started)
        self._generation = 0

    def occupy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))

    def stream(self, *, own: bool) -> AbstractContextManager[object]:
        return torch.cuda.stream(torch.cuda.Stream() if own else torch.cuda.default_stream())

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def group(self, *, timeout_s: float, blocking: bool) -> Backend:
        from torch.distributed import ProcessGroupNCCL

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._generation += 1
        before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocking))  # read by the constructor
        try:
            store = TCPStore("127.0.0.1", port, 1, True)
            own_store = torch.distributed.PrefixStore(str(self._generation), store)
            group = cast("Backend", ProcessGroupNCCL(own_store, 0, 1, options))
        finally:
            del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
            if before is not None:
                os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
        group.broadcast([self.tensor()], BroadcastOptions()).wait()
        torch.cuda.synchronize()
        return group

    def tensor(self) -> torch.Tensor:
        return torch.ones(1024, device=self.device)


def run(where: Where, streams: Streams | None = None) -> tuple[list[Ratio], list[str]]:
    """Measure what a broadcast of another thread and the weight sync wait for. `streams`: those of tests."""
    if streams is None:
        if where.device.type != "cuda":
            return [], ["everything: a CPU has no streams"]
        streams = CudaStreams(where.device)
    group = streams.group(timeout_s=GIVE_UP_S, blocking=False)
    rows = [
        # The premise of all this: if it does not hold, the other rows prove nothing.
        row("pending work / wait of a broadcast on the default stream", OCCUPIED_S,
            broadcast_alongside_work(streams, group, own=False), 1.1, "s"),
        row("wait of a broadcast on a stream of its own / pending work",
            broadcast_alongside_work(streams, group, own=True), OCCUPIED_S, 0.5, "s"),
    ]  # fmt: skip
    rows += blocking_rows(streams)
    rows += publish.rows(where, streams, OCCUPIED_S)
    return rows, []


def broadcast_alongside_work(streams: Streams, group: Backend, *, own: bool) -> float:
    """Return the seconds from the start of work on the default stream to the end of a broadcast of another thread."""
    seconds: list[float] = []
    tensor = streams.tensor()
    streams.synchronize()

    def send() -> None:
        with streams.stream(own=own):
            wait_until_complete(group.broadcast([tensor], BroadcastOptions()))
        seconds.append(time.perf_counter() - started)

    started = time.perf_counter()
    streams.occupy(OCCUPIED_S)
    thread = threading.Thread(target=send)
    thread.start()
    thread.join(GIVE_UP_S)
    streams.synchronize()
    if not seconds:
        raise TimeoutError(f"a broadcast was not complete after {GIVE_UP_S:.0f} s")
    return seconds[0]


def wait_until_complete(work: Work) -> None:
    """Poll until the work is complete, at most for GIVE_UP_S."""
    started = time.perf_counter()
    while not work.is_completed():
        if time.perf_counter() - started > GIVE_UP_S:
            raise TimeoutError(f"not complete after {GIVE_UP_S:.0f} s")
        time.sleep(POLL_S)


def blocking_rows(streams: Streams) -> list[Ratio]:
    """Measure the timeout of a group in blocking mode, and how long an abort of a pending broadcast takes.

    In this mode no watchdog ends the process. NCCL ignores `BroadcastOptions.timeout`: the group's timeout counts. An
    abort frees device memory, for which it may wait for the pending work: that is 1.4 of the limit.
    """
    limit_s, asked_s = 2 * OCCUPIED_S, OCCUPIED_S / 5
    group = streams.group(timeout_s=limit_s, blocking=True)
    options = BroadcastOptions()
    options.timeout = timedelta(seconds=asked_s)
    tensor = streams.tensor()
    streams.synchronize()
    streams.occupy(1.4 * limit_s)
    started = time.perf_counter()
    raised = ""
    try:
        with streams.stream(own=False):
            group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raised = str(error).splitlines()[0]
    waited = time.perf_counter() - started
    started = time.perf_counter()
    group.abort()
    aborted = time.perf_counter() - started
    streams.synchronize()
    details = {"raised": raised, "operation_timeout_s": asked_s, "ignored": waited > 2 * asked_s}
    return [
        row("blocking wait / timeout of the group", waited if raised else float("inf"), limit_s, 1.7, "s", details),
        row("abort of a pending broadcast / timeout of the group", aborted, limit_s, 3.0, "s"),
    ]
