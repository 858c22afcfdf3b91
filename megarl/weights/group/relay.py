"""Relays weights to engines on the trainer's GPUs, because NCCL takes no two members on one GPU.

The trainer ranks broadcast among themselves. Each relays the data to the engine workers on its device through two
buffers that both processes map: it fills one, announces it, and fills the other while the workers read. A worker copies
the content and answers; then the buffer is free. On a GPU the buffers are plain device memory, of which the workers get
a CUDA IPC handle; elsewhere they are in a memfd. Handles are exchanged once per buffer as plain values, without pickle.

Both ends talk over a Unix socket in the abstract namespace. Its name comes through the run's signed store, and each
end checks that the other process is its own user's. A socket that closes is a member that has died.

Tensors may have any shape; B bytes of a buffer.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import BroadcastOptions, Work

from megarl.weights.group.store import SyncStore

BUFFERS = 2
_MESSAGE_BYTES = 4096
_POLL_S = 0.0005


class Backend(Protocol):
    """The methods of ProcessGroupGloo and ProcessGroupNCCL that a group calls. torch declares no type for all three."""

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work:
        """Begin a broadcast from the rank in `options`."""

    def abort(self) -> None:
        """End all operations that are running."""

    def shutdown(self) -> None:
        """Leave the group."""


@dataclass(frozen=True)
class MemberPlace:
    """One member's place in a group, and timeouts in seconds: for connecting, and for each operation."""

    name: str
    rank: int
    size: int
    connect_s: float
    operation_s: float
    senders: int = 0  # the first members, which are trainer ranks
    store: SyncStore | None = None  # in which the members of a relay find each other, by keys that begin with `keys`
    keys: str = ""


class RelayWork:
    """One broadcast, in steps, with the interface of torch's Work."""

    def __init__(self, steps: Iterator[None], *, driven: bool = False) -> None:
        """`steps`: ends with the broadcast and raises its error. `driven`: a thread calls `advance`; otherwise each
        poll advances the broadcast.
        """
        self._steps, self._driven, self._ended = steps, driven, False
        self._failure: BaseException | None = None

    def is_completed(self) -> bool:
        """Return whether it has ended, or failed."""
        return self._ended if self._driven else self.advance()

    def advance(self) -> bool:
        """Take one step; return whether it was the last one."""
        if not self._ended:
            try:
                next(self._steps)
            except StopIteration:
                self._ended = True
            except OSError as error:
                self._failure = RuntimeError(f"the connection of the relay is lost: {error}")
                self._ended = True
            except Exception as error:
                self._failure = error
                self._ended = True
        return self._ended

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for its end. Raises RuntimeError if it has failed, or after `timeout`."""
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if deadline is not None and time.monotonic() > deadline:
                raise RuntimeError("the relay did not finish in time")
            time.sleep(_POLL_S)
        if self._failure is not None:
            raise self._failure
        return True


def device_of(number: int) -> str:
    """Return what identifies this process's device on its host; "" without a GPU, where any worker matches."""
    return str(torch.cuda.get_device_properties(number).uuid) if number >= 0 else ""


def join(place: MemberPlace, device: str, inner: Callable[[], Backend] | None) -> TrainerEnd | WorkerEnd:
    """Connect one member. `device`: where it is, for a match.

    `inner`: makes the group of the trainer ranks; None if there is only one.

    Raises RuntimeError if the members do not find each other within `place.connect_s`.
    """
    deadline, store, keys = time.monotonic() + place.connect_s, place.store, place.keys
    assert store is not None
    here = {"host": os.uname().nodename, "device": device}

    def others(kind: str, ranks: range) -> list[Any]:
        left = max(0.1, deadline - time.monotonic())
        answers = store.block_all([f"{keys}/{kind}/{rank}" for rank in ranks], left)
        if answers is None:
            raise RuntimeError(f"{place.name} waited {place.connect_s:.0f} s for the members of the relay")
        return answers

    trainers, workers = range(place.senders), range(place.senders, place.size)
    if place.rank in trainers:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = f"megarl-relay-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(max(1, len(workers)))
            store.put(f"{keys}/trainer/{place.rank}", {**here, "socket": name})
            mine = sum(answer["relay"] == place.rank for answer in others("worker", workers))
            channels = list[socket.socket]()
            try:
                while len(channels) < mine:
                    listener.settimeout(max(0.001, deadline - time.monotonic()))
                    with contextlib.suppress(PermissionError):  # every user of the host can see the socket's name
                        channels.append(_own(listener.accept()[0]))
            except TimeoutError:
                waited = f"{place.name} waited {place.connect_s:.0f} s for the engine workers on its device"
                raise RuntimeError(f"{waited} to connect to its relay") from None
        return TrainerEnd(None if inner is None else inner(), channels)
    offers = others("trainer", trainers)
    near = [rank for rank, offer in enumerate(offers) if {key: offer[key] for key in here} == here]
    if not near:
        store.put(f"{keys}/worker/{place.rank}", {"relay": -1})
        raise RuntimeError(f"{place.name} finds no trainer rank on its device: {here}")
    relay = near[(place.rank - place.senders) % len(near)]
    store.put(f"{keys}/worker/{place.rank}", {"relay": relay})
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(max(0.1, deadline - time.monotonic()))
    channel.connect(f"\0{offers[relay]['socket']}")
    return WorkerEnd(_own(channel))


def _own(channel: socket.socket) -> socket.socket:
    """Return a connection that does not block. Raises PermissionError if its peer is another user's."""
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        channel.close()
        raise PermissionError(f"a process of user {user} has connected to the relay of weights")
    channel.setblocking(False)
    return channel


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a message with its files; None if there is none yet. Raises RuntimeError if the peer has gone."""
    try:
        content, files, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
    except BlockingIOError:
        return None
    if not content:
        raise RuntimeError("the other end of the relay has closed its connection")
    return json.loads(content), files


class TrainerEnd:
    """The end of a trainer rank. A thread relays the data, because the rank itself may wait for others in a gather."""

    def __init__(self, inner: Backend | None, channels: Sequence[socket.socket]) -> None:
        """`inner`: None for the only rank; `channels`: one to each worker on this device."""
        self._inner, self._channels = inner, channels
        self._buffers: list[_Shared | None] = [None] * BUFFERS
        self._reading: list[set[int]] = [set() for _ in range(BUFFERS)]  # the channels whose worker reads a buffer
        self._passed = 0
        self._closed = False
        self._works: queue.SimpleQueue[RelayWork | None] = queue.SimpleQueue()
        threading.Thread(target=self._drive, name="weight-relay", daemon=True).start()

    def _drive(self) -> None:
        while (work := self._works.get()) is not None:
            while not work.advance():
                time.sleep(_POLL_S)
        with _LOCK:
            _UNUSED.extend(each for each in self._buffers if each is not None)

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> RelayWork:
        """Take part in a broadcast and relay it. The tensor is free when the work has ended."""
        work = None if self._inner is None else self._inner.broadcast(tensors, options)
        passing = RelayWork(self._steps(tensors[0], work), driven=True)
        self._works.put(passing)
        return passing

    def _steps(self, tensor: torch.Tensor, work: Work | None) -> Iterator[None]:
        if tensor.device.type == "cuda":
            torch.cuda.set_device(tensor.device)  # of the thread
        if work is not None:
            while not work.is_completed():
                yield
            work.wait()
        if not self._channels:
            return
        content_B = tensor.reshape(-1).view(torch.uint8)
        index = self._passed % BUFFERS
        while self._reading[index]:
            if self._closed:
                raise RuntimeError("the relay was closed while engine workers read from it")
            self._take_answers()
            yield
        self._passed += 1
        buffer, files = self._buffers[index], list[int]()
        sent: dict[str, Any] = {"buffer": index, "nbytes": content_B.numel()}
        if buffer is None or buffer.content_B.numel() < content_B.numel():
            buffer = self._buffers[index] = _Shared.get(content_B.numel(), tensor.device)
            sent["handle"], files = buffer.export()
        buffer.content_B[: content_B.numel()].copy_(content_B)
        _synchronize(tensor.device)
        for number, channel in enumerate(self._channels):
            socket.send_fds(channel, [json.dumps(sent).encode()], files)
            self._reading[index].add(number)

    def _take_answers(self) -> None:
        for number, channel in enumerate(self._channels):
            while (answer := _receive(channel)) is not None:
                self._reading[answer[0]["free"]].discard(number)

    def abort(self) -> None:
        """End all operations that are running."""
        if self._inner is not None:
            self._inner.abort()
        self._close()

    def shutdown(self) -> None:
        """Leave the group."""
        if self._inner is not None:
            self._inner.shutdown()
        self._close()

    def _close(self) -> None:
        self._closed = True
        self._works.put(None)
        for channel in self._channels:
            channel.close()
        self._channels = ()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # an exported buffer that was too small lives until then


class WorkerEnd:
    """The end of an engine worker."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._buffers: dict[int, _Shared] = {}

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> RelayWork:
        """Receive a broadcast of a trainer rank into the tensor."""
        return RelayWork(self._steps(tensors[0]))

    def _steps(self, tensor: torch.Tensor) -> Iterator[None]:
        while (message := _receive(self._channel)) is None:
            yield
        sent, files = message
        if "handle" in sent:
            self._buffers[sent["buffer"]] = _Shared.opened(sent["handle"], files, tensor.device)
        target_B = tensor.reshape(-1).view(torch.uint8)
        if sent["nbytes"] != target_B.numel():
            raise RuntimeError(f"a trainer rank relayed {sent['nbytes']} bytes, not {target_B.numel()}")
        target_B.copy_(self._buffers[sent["buffer"]].content_B[: target_B.numel()])
        _synchronize(tensor.device)
        self._channel.send(json.dumps({"free": sent["buffer"]}).encode())

    def abort(self) -> None:
        """End all operations that are running."""
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the group."""
        self._channel.close()
        self._buffers = {}


@dataclass(frozen=True)
class _Shared:
    """A buffer [B] that another process can map; `file`: of a memfd, None on a GPU."""

    content_B: torch.Tensor
    file: int | None

    @classmethod
    def get(cls, nbytes: int, device: torch.device) -> _Shared:
        """Return a buffer with at least `nbytes`, of an earlier group if there is one."""
        with _LOCK:
            for number, each in enumerate(_UNUSED):
                if each.content_B.numel() >= nbytes and each.content_B.device == device:
                    return _UNUSED.pop(number)
        if device.type == "cuda":
            return cls(torch.empty(nbytes, dtype=torch.uint8, device=device), None)
        file = os.memfd_create("megarl-relay")
        os.ftruncate(file, nbytes)
        return cls(torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8), file)

    def export(self) -> tuple[dict[str, Any], list[int]]:
        """Return what `opened` needs: JSON content, and files. On a GPU: torch's own CUDA IPC handle."""
        if self.file is not None:
            return {"bytes": self.content_B.numel()}, [self.file]
        values: Any = self.content_B.untyped_storage()
        parts = values._share_cuda_()  # torch/multiprocessing/reductions.py: device, handles, sizes, offsets
        return {"parts": [part.hex() if isinstance(part, bytes) else part for part in parts],
                "are_bytes": [isinstance(part, bytes) for part in parts]}, []  # fmt: skip

    @classmethod
    def opened(cls, handle: dict[str, Any], files: Sequence[int], device: torch.device) -> _Shared:
        """Return the buffer of another process."""
        if device.type != "cuda":
            (file,) = files
            content_B = torch.frombuffer(mmap.mmap(file, handle["bytes"]), dtype=torch.uint8)
            os.close(file)
            return cls(content_B, None)
        pairs = zip(handle["parts"], handle["are_bytes"], strict=True)
        parts = [bytes.fromhex(part) if is_bytes else part for part, is_bytes in pairs]
        parts[0] = device.index if device.index is not None else torch.cuda.current_device()
        storage: Any = torch.UntypedStorage._new_shared_cuda(*parts)  # type: ignore[attr-defined]
        return cls(torch.empty(0, dtype=torch.uint8, device=device).set_(storage), None)

    def __del__(self) -> None:
        if self.file is not None:
            os.close(self.file)


# Buffers of earlier groups. On a GPU torch never frees one whose worker was killed (torch/csrc/CudaIPCTypes.cpp).
_UNUSED: list[_Shared] = []
_LOCK = threading.Lock()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
