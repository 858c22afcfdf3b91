"""Brings rows of Hugging Face tensors from the shards of a tensor-parallel group to the rank that owns the tensors.

A `Gather` is one rank's part for a fixed list of rows: the owner receives and copies, the other ranks of the group copy
and send. A large block of rows goes straight from the parameter into its target. A sender's other blocks, small or
strided, share one message. A gather is built once and run for every export. The caller bounds all waits.

Shapes: B bytes of a flat uint8 buffer; a shard, a target and the blocks of both are [rows, ...] like the tensor.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup, Work

from megarl.models.architecture.mapping import Entry
from megarl.models.megatron.shards import Shard

DIRECT_BYTES = 2**20  # blocks of at least this size are sent alone, without a copy
_ALIGNMENT = 16  # bytes: any dtype can be viewed in place
_POLL_S = 0.00025


@dataclass(frozen=True)
class Rows:
    """Rows [start, stop) of tensor number `tensor` of a manifest."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class GatherRequest:
    """Rows to gather. `targets`: on the owner, a tensor [stop - start, ...] for each; () elsewhere."""

    rows: tuple[Rows, ...]
    targets: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class TensorPart:
    """This rank's part of one Hugging Face tensor: source number `source` of a Megatron shard.

    `group`: None if one rank has the whole tensor. `dtype`: the export's.
    """

    shard: Shard
    source: int
    dtype: torch.dtype
    group: ProcessGroup | None

    @property
    def owned(self) -> bool:
        """True if this rank receives the whole tensor: it is the first of its group."""
        return self.shard.rank == 0

    def whole(self) -> torch.Tensor:
        """Return the whole tensor on a rank that has all of it: a view if it is one piece of the shard."""
        axis = self.shard.entry.rule.axis or 0
        parameter = self.shard.parameter.data
        blocks = sorted(segments(self.shard.entry, self.source, self.shard.rank, self.shard.size), key=lambda b: b[1])
        parts = [parameter.narrow(axis, offset, stop - start) for offset, start, stop in blocks]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, axis)).to(self.dtype)

    @property
    def size(self) -> int:
        """The number of ranks that hold different parts of the tensor."""
        return 1 if self.group is None else self.shard.size


@dataclass(frozen=True)
class _Block:
    """A rectangle shared by a shard and a target: [count, ...] at `offset` and `start` along `axis`.

    `rows`: for a block of columns (axis > 0), the range of the shard's rows.
    """

    axis: int
    offset: int
    start: int
    count: int
    rows: tuple[int, int] | None

    def in_shard(self, shard: torch.Tensor) -> torch.Tensor:
        block = shard.narrow(self.axis, self.offset, self.count)
        return block if self.rows is None else block.narrow(0, self.rows[0], self.rows[1] - self.rows[0])

    def in_target(self, target: torch.Tensor) -> torch.Tensor:
        return target.narrow(self.axis, self.start, self.count)

    def shape(self, tensor_shape: Sequence[int]) -> tuple[int, ...]:
        shape = list(tensor_shape)
        if self.rows is not None:
            shape[0] = self.rows[1] - self.rows[0]
        shape[self.axis] = self.count
        return tuple(shape)


def segments(entry: Entry, source: int, rank: int, size: int) -> list[tuple[int, int, int]]:
    """Return where a rank's shard holds Hugging Face tensor `source`: (offset in the shard, start, stop) triples.

    All count along the rule's axis (or axis 0), start and stop in the Hugging Face tensor. Adjacent triples are merged.
    """
    merged: list[tuple[int, int, int]] = []
    offset = 0
    for piece in entry.pieces(rank, size):
        if piece.source == source:
            if merged and merged[-1][2] == piece.start and merged[-1][0] + merged[-1][2] - merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1], piece.stop)
            else:
                merged.append((offset, piece.start, piece.stop))
        offset += piece.size
    return merged


def _blocks(part: TensorPart, rank: int, rows: Rows) -> Iterator[_Block]:
    """Yield the blocks of `rows` that the shard of group rank `rank` holds."""
    axis = part.shard.entry.rule.axis or 0
    for offset, start, stop in segments(part.shard.entry, part.source, rank, part.shard.size):
        if axis > 0:
            yield _Block(axis, offset, start, stop - start, (rows.start, rows.stop))
            continue
        low, high = max(start, rows.start), min(stop, rows.stop)
        if low < high:
            yield _Block(0, offset + low - start, low - rows.start, high - low, None)


@dataclass
class _Route:
    """The messages between this rank and one peer of a group, in the order in which both post them.

    `direct`: tensors sent alone. `staged`: for each other block its tensor on this rank, its shape and dtype, and its
    byte offset in the shared message of `nbytes` bytes.
    """

    group: ProcessGroup
    peer: int  # its rank in the group
    direct: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)
    staged: list[tuple[torch.Tensor, tuple[int, ...], torch.dtype, int]] = field(default_factory=list)
    nbytes: int = 0

    def add(self, block: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, direct: bool) -> None:
        """Add a block; both ends must pass the same shape, dtype and `direct`."""
        nbytes = math.prod(shape) * dtype.itemsize
        if direct and nbytes >= DIRECT_BYTES:
            self.direct.append((block, dtype))
        else:
            self.staged.append((block, shape, dtype, self.nbytes))
            self.nbytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass
class _Program:
    """The operations of one rank in a gather. `copies`: (target, source) pairs within this rank."""

    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    routes: dict[tuple[int, int], _Route] = field(default_factory=dict)
    parameters: list[torch.Tensor] = field(default_factory=list)

    @property
    def staging_bytes(self) -> int:
        return sum(route.nbytes for route in self.routes.values())

    def route(self, group: ProcessGroup, peer: int) -> _Route:
        return self.routes.setdefault((id(group), peer), _Route(group, peer))


def _program(parts: dict[int, TensorPart], request: GatherRequest, direct: bool) -> _Program:
    """Work out this rank's copies and messages. `direct`: targets and parameters are on one device."""
    program = _Program()
    for number, rows in enumerate(request.rows):
        part = parts.get(rows.tensor)
        if part is None or (part.group is None and not part.owned):
            continue
        parameter = part.shard.parameter.data
        program.parameters.append(part.shard.parameter)
        axis = part.shard.entry.rule.axis or 0
        shape = part.shard.entry.shapes[part.source]
        if not part.owned:
            assert part.group is not None
            route = program.route(part.group, 0)
            for block in _blocks(part, part.shard.rank, rows):
                route.add(block.in_shard(parameter), block.shape(shape), part.dtype, direct and axis == 0)
            continue
        target = request.targets[number]
        if tuple(target.shape) != (rows.stop - rows.start, *shape[1:]) or target.dtype != part.dtype:
            raise ValueError(
                f"{part.shard.entry.names[part.source]}: rows {rows.start} to {rows.stop} of {shape} {part.dtype} "
                f"do not fit a target of {tuple(target.shape)} {target.dtype}"
            )
        for block in _blocks(part, 0, rows):
            program.copies.append((block.in_target(target), block.in_shard(parameter)))
        for peer in range(1, part.size):
            assert part.group is not None
            for block in _blocks(part, peer, rows):
                route = program.route(part.group, peer)
                route.add(block.in_target(target), block.shape(shape), part.dtype, direct and axis == 0)
    program.routes = {key: route for key, route in program.routes.items() if route.direct or route.staged}
    return program


class Gather:
    """One rank's part in gathering some rows. Call `copy` and `post` (a sender copies first), `done`, `finish`.

    `owned`: this rank receives; else it sends. `peers`: global ranks of the other ends.
    """

    def __init__(self, build: Callable[[], _Program], owned: bool, waiter: GlooWaiter) -> None:
        self.owned = owned
        self._build = build
        self._program = build()
        routes = self._program.routes.values()
        self.peers = tuple(torch.distributed.get_global_rank(route.group, route.peer) for route in routes)
        self._waiter = waiter
        self._works: list[tuple[Work, torch.Tensor]] = []  # with the tensor, which must live until then
        self._waited: list[Future[None]] = []

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory for messages of several blocks."""
        return self._program.staging_bytes

    def bind(self, staging_B: torch.Tensor) -> None:
        """Use `staging_B`, at least `staging_bytes` long, for messages of several blocks. Call it first.

        Another gather may use the same memory once this one is done.
        """
        self._staging_B = staging_B
        self._addresses = [parameter.data_ptr() for parameter in self._program.parameters]
        between: list[tuple[torch.Tensor, torch.Tensor]] = []  # (block, its place in the staging memory)
        self._messages: list[tuple[_Route, torch.Tensor, torch.dtype]] = []
        offset = 0
        for route in self._program.routes.values():
            message_B = staging_B[offset : offset + route.nbytes]
            offset += route.nbytes
            self._messages += [(route, block, dtype) for block, dtype in route.direct]
            if route.staged:
                self._messages.append((route, message_B, torch.uint8))
            for block, shape, dtype, start in route.staged:
                place_B = message_B[start : start + math.prod(shape) * dtype.itemsize]
                between.append((block, place_B.view(dtype).view(shape)))
        if self.owned:
            self._before, self._after = _Copies(self._program.copies), _Copies(between)
        else:
            self._before, self._after = _Copies([(place, block) for block, place in between]), _Copies([])

    def copy(self) -> None:
        """Copy this rank's rows: on the owner into the targets, elsewhere into the messages."""
        moved = [parameter.data_ptr() for parameter in self._program.parameters] != self._addresses
        if moved:
            self._program = self._build()
            self.bind(self._staging_B)
        self._before.run()

    def post(self) -> None:
        """Start receiving (owner) or sending (other ranks, after `copy`)."""
        for route, tensor, dtype in self._messages:
            sent = tensor
            if self.owned:
                work = torch.distributed.irecv(tensor, group=route.group, group_src=route.peer)
            else:
                sent = tensor.to(dtype).contiguous()
                work = torch.distributed.isend(sent, group=route.group, group_dst=route.peer)
            assert work is not None, "this rank is a member of the group"
            self._works.append((work, sent))

    def done(self, timeout_s: float | None) -> bool:
        """Wait at most `timeout_s` seconds for the messages; return whether all have been transferred.

        None: as long as the group's timeout. Raises RuntimeError if a connection is lost or that timeout expires.
        """
        if timeout_s is not None and not self._waited and self._on_gloo():
            self._waited = [self._waiter.wait(work) for work, _ in self._works]
        if self._waited:
            if wait(self._waited, timeout_s).not_done:
                return False
            for future in self._waited:
                future.result()
        elif timeout_s is not None:
            deadline = time.monotonic() + timeout_s
            while not all(work.is_completed() for work, _ in self._works):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        if not self._waited:
            for work, _ in self._works:
                work.wait()  # complete unless `timeout_s` is None: orders the stream and raises errors
        self._works, self._waited = [], []
        return True

    def _on_gloo(self) -> bool:
        return bool(self._messages) and torch.distributed.get_backend(self._messages[0][0].group) == "gloo"

    def unfinished_peers(self) -> tuple[int, ...]:
        """Return the global ranks whose posted messages have not been transferred. Thread-safe."""
        ended = [future.done() for future in self._waited] or [work.is_completed() for work, _ in self._works]
        routes = [route for (route, _, _), done in zip(self._messages, ended, strict=False) if not done]
        return tuple({torch.distributed.get_global_rank(route.group, route.peer): None for route in routes})

    def finish(self) -> None:
        """On the owner, copy received blocks into their targets. Call it after `done`."""
        self._after.run()


class _Copies:
    """Copies between fixed pairs of tensors, in a few calls."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        # CUDA batches the copies of a list only if all its pairs have equal dtypes and strides.
        self._lists: dict[tuple[object, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in pairs:
            key = (target.dtype, source.dtype, target.stride() == source.stride())
            targets, sources = self._lists.setdefault(key, ([], []))
            targets.append(target)
            sources.append(source)

    def run(self) -> None:
        for targets, sources in self._lists.values():
            torch._foreach_copy_(targets, sources)


class GlooWaiter:
    """Waits for gloo's messages in a daemon thread, in the order of the calls. The thread ends when none are left.

    Polling never completes gloo's sends and receives (torch 2.13), and a wait that times out closes all connections of
    the group. So a thread has to wait as long as the group allows.
    """

    def __init__(self) -> None:
        self._works: deque[tuple[Work, Future[None]]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def wait(self, work: Work) -> Future[None]:
        """Return a future that is done when `work` is, with its error if it failed."""
        future: Future[None] = Future()
        with self._lock:
            self._works.append((work, future))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="gather-waiter", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._works:
                    self._running = False
                    return
                work, future = self._works.popleft()
            try:
                work.wait()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)
            del work, future


def build_gathers(
    parts: dict[int, TensorPart], requests: Sequence[GatherRequest], device: torch.device, waiter: GlooWaiter
) -> list[Gather | None]:
    """Build this rank's part of each request; None where it has none. `device`: the targets'.

    Two consecutive gathers in which this rank sends may overlap: senders alternate between two staging buffers. Raises
    ValueError if shape or dtype of a target differ from its rows'.
    """
    gathers: list[Gather | None] = []
    on = next((part.shard.parameter.device for part in parts.values()), device)
    for request in requests:
        held = [parts[rows.tensor] for rows in request.rows if rows.tensor in parts]
        owned = any(part.owned for part in held)
        if not any(part.owned or part.group is not None for part in held):
            gathers.append(None)
            continue

        def build(request: GatherRequest = request) -> _Program:
            return _program(parts, request, direct=device.type == on.type)

        gather = Gather(build, owned, waiter)
        gathers.append(gather if owned or gather.peers else None)
    present = [gather for gather in gathers if gather is not None]
    for role, count in ((True, 1), (False, 2)):
        mine = [gather for gather in present if gather.owned is role]
        size = max((gather.staging_bytes for gather in mine), default=0)
        memory = [torch.empty(size, dtype=torch.uint8, device=on) for _ in range(count if size else 1)]
        for number, gather in enumerate(mine):
            gather.bind(memory[number % len(memory)])
    return gathers
