"""A process group over gloo whose operations behave as NCCL's do on simulated streams.

An operation is enqueued and returns at once. It starts when everything before it on the caller's current stream has
finished, completes when all members have started theirs, and those of one communicator run in order on its own internal
stream. Sends and receives have a communicator per pair of ranks, which is made at the first of them: it blocks
the host until both ranks have come. `Work.wait` makes the current stream wait, not the host; a host sees the end by
`is_completed`. Threads that use no simulated device (engines) wait on the host instead. In blocking mode `Work.wait`
also makes the host wait, at most for the group's timeout, and then raises RuntimeError.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store

from tests.support.streams.simulated_streams import Closed, Device, Queue, current_device, current_stream

GLOO_TIMEOUT = timedelta(seconds=30)


class SimulatedWork(torch.distributed.Work):
    """One enqueued operation."""

    def __init__(self, device: Device, done: threading.Event, blocking_s: float | None) -> None:
        super().__init__()
        self._device, self._done, self._blocking_s = device, done, blocking_s

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._blocking_s is not None and not self._done.wait(self._blocking_s):
            raise RuntimeError(f"collective operation timeout after {self._blocking_s} s")
        if current_device() is self._device:
            current_stream().wait(self._done)
        else:
            self._device.host_wait(self._done)
        return True


class SimulatedNCCL(ProcessGroup):
    """Broadcast, send and receive. `delay_s`: how long a broadcast takes at least."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: Device,
        delay_s: float = 0.0,
        blocking_s: float | None = None,
    ) -> None:
        """`blocking_s`: the timeout of blocking mode; None: not in blocking mode."""
        super().__init__(rank, size)
        self._blocking_s = blocking_s
        self._store, self._rank, self._size, self._device, self._delay_s = store, rank, size, device, delay_s
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=GLOO_TIMEOUT)
        self._streams: dict[str, Queue] = {}
        self._issued: Counter[str] = Counter()
        self.connected: list[str] = []  # pairs of ranks, in the order of their first messages

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> SimulatedWork:
        def transfer() -> None:
            time.sleep(self._delay_s)
            self._gloo.broadcast(tensors, options).wait()

        return self._enqueue("all", self._size, transfer)

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> SimulatedWork:
        self._connect(to)
        return self._enqueue(_pair(self._rank, to), 2, lambda: self._gloo.send(tensors, to, tag).wait())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> SimulatedWork:
        self._connect(source)
        return self._enqueue(_pair(source, self._rank), 2, lambda: self._gloo.recv(tensors, source, tag).wait())

    def _connect(self, other: int) -> None:
        """At the first message of a pair, block the host until both ranks have come, without a bound of its own."""
        pair = _pair(min(self._rank, other), max(self._rank, other))
        if pair not in self.connected:
            self._meet(f"connect/{pair}", 2)
            self.connected.append(pair)

    def abort(self) -> None:
        """Operations that have not started never will; see `Device.close`."""

    def shutdown(self) -> None:
        """Do what `abort` does."""

    def getBackendName(self) -> str:
        return "simulated"

    def _enqueue(self, communicator: str, members: int, transfer: Callable[[], Any]) -> SimulatedWork:
        key = f"{communicator}/{self._issued[communicator]}"
        self._issued[communicator] += 1
        stream = self._streams.get(communicator) or self._device.new_stream()
        self._streams[communicator] = stream
        if current_device() is self._device:
            stream.wait(current_stream().record())
        done = threading.Event()

        def operation() -> None:
            self._meet(key, members)
            transfer()
            done.set()

        stream.submit(operation)
        return SimulatedWork(self._device, done, self._blocking_s)

    def _meet(self, key: str, members: int) -> None:
        """Wait until all members have started an operation."""
        started = self._store.add(key, 1)
        while started < members:
            if self._device.closed.wait(0.001):
                raise Closed
            started = self._store.add(key, 0)


def _pair(source: int, to: int) -> str:
    return f"{min(source, to)}-{max(source, to)}"
