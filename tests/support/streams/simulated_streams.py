"""CUDA's streams on a CPU: work is enqueued in program order and done later, by threads.

`Device` is one accelerator: a default stream, which all threads share, and the streams of its communicators.
`on(device)` makes a thread use it: a TorchDispatchMode enqueues every operation on the thread's current stream (the
default one, or the one given to `on`) instead of executing it. Views are made at once, results of other operations are
allocated at once and written later. Only a read by the host (`.item()`) waits for the stream. With `single_queue` all
streams share one hardware queue in strict order of issue (CUDA_DEVICE_MAX_CONNECTIONS=1).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

WAIT_S = 60.0
_here = threading.local()


class Closed(Exception):
    """The device was closed while something waited on it."""


class Device:
    """One simulated accelerator."""

    def __init__(self, *, single_queue: bool = False, host_wait_s: float = WAIT_S) -> None:
        """`host_wait_s`: after this time a host that waits for a stream gives up, which it would not on CUDA."""
        self._host_wait_s = host_wait_s
        self.closed = threading.Event()
        self.errors: list[BaseException] = []
        self._single = Queue(self) if single_queue else None
        self._queues: list[Queue] = [self._single] if self._single else []
        self.default = self.new_stream()

    def new_stream(self) -> Queue:
        """A stream, i.e. the queue that executes it."""
        if self._single is not None:
            return self._single
        self._queues.append(Queue(self))
        return self._queues[-1]

    def synchronize(self) -> None:
        """Make the host wait for everything that was enqueued."""
        for each in list(self._queues):
            self.host_wait(each.record())

    def host_wait(self, event: threading.Event) -> None:
        """Make the host wait for an event. Raises what failed on the device, Closed, or TimeoutError."""
        if not event.wait(self._host_wait_s):
            raise TimeoutError(f"the host waited {self._host_wait_s:.0f} s for a simulated stream")
        if self.errors:
            raise self.errors[0]

    def close(self) -> None:
        """Skip what is enqueued, and end all threads."""
        self.closed.set()
        for each in self._queues:
            each.submit(None)
        for each in self._queues:
            each.thread.join(WAIT_S)


class Queue:
    """Executes its items one after the other, in a thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._items: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="simulated-stream", daemon=True)
        self.thread.start()

    def submit(self, item: Callable[[], None] | None) -> None:
        self._items.put(item)

    def record(self) -> threading.Event:
        """An event that is set when everything before it is done."""
        event = threading.Event()
        self.submit(event.set)
        return event

    def wait(self, event: threading.Event) -> None:
        """Let what is enqueued later wait for an event; the host goes on."""
        self.submit(lambda: self._block(event))

    def _block(self, event: threading.Event) -> None:
        while not event.wait(0.01):
            if self._device.closed.is_set():
                raise Closed

    def _run(self) -> None:
        with torch.no_grad():
            while (item := self._items.get()) is not None:
                try:
                    # Events are set even then, so that nobody waits forever.
                    if not self._device.closed.is_set() or getattr(item, "__name__", "") == "set":
                        item()
                except BaseException as error:
                    if not isinstance(error, Closed):  # a wait that the device's end cut short is no failure
                        self._device.errors.append(error)
                del item


def current_device() -> Device | None:
    """The device that this thread uses."""
    return getattr(_here, "device", None)


def current_stream() -> Queue:
    """The stream on which this thread issues; the thread must use a device."""
    stream: Queue = _here.stream
    return stream


@contextmanager
def on(device: Device, stream: Queue | None = None) -> Iterator[None]:
    """Let this thread's tensor operations run on a stream of the device, by default on its default stream."""
    before = current_device(), getattr(_here, "stream", None)
    _here.device, _here.stream = device, stream or device.default
    try:
        with _disable_current_modes(), Enqueue(device, _here.stream):  # an inner `on` replaces the outer one
            yield
    finally:
        _here.device, _here.stream = before


class Enqueue(TorchDispatchMode):
    """Enqueues operations on a stream of a device."""

    def __init__(self, device: Device, stream: Queue) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        if not any(isinstance(each, torch.Tensor) for each in flat) or _is_view(func):
            return func(*args, **kwargs)  # new memory, or another view of memory: nothing is read
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.equal.default:
            self._device.host_wait(self._stream.record())
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written is not None:
            self._stream.submit(lambda: func(*args, **kwargs))
            return written[0] if func._schema.returns else None
        results = _allocate(func, args, kwargs)

        def execute() -> None:
            values, _ = tree_flatten(func(*args, **kwargs))
            for result, value in zip(tree_flatten(results)[0], values, strict=True):
                result.copy_(value)

        self._stream.submit(execute)
        return results


def _is_view(func: Any) -> bool:
    returned = [each.alias_info for each in func._schema.returns]
    return bool(returned) and all(alias is not None and not alias.is_write for alias in returned)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """The arguments that an operation in place writes, or None for one that makes new tensors."""
    arguments = func._schema.arguments
    if not any(each.alias_info is not None and each.alias_info.is_write for each in arguments):
        return None
    given = [args[i] if i < len(args) else kwargs.get(each.name) for i, each in enumerate(arguments)]
    return [
        value
        for each, value in zip(arguments, given, strict=True)
        if each.alias_info is not None and each.alias_info.is_write
    ]


def _allocate(func: Any, args: Any, kwargs: Any) -> Any:
    """Memory for the results of an operation: their shapes follow from those of the arguments."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    shapes = func(*tree_map_only(torch.Tensor, meta, args), **tree_map_only(torch.Tensor, meta, kwargs))
    return tree_map_only(
        torch.Tensor, lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype), shapes
    )
