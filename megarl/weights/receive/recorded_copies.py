"""Records which copies vLLM's weight loaders make into live weights, and repeats them without the loaders.

A loader takes about 30 microseconds of Python to find the place of one tensor, and a mixture of experts has tens of
thousands. For one model the places never change. So the first sync runs the loaders and records each copy from a
received tensor into a weight, as vLLM's own backend `sharded_rdt` does. Later syncs repeat the copies, in one call per
bucket.

Only copies can be repeated. If a loader computes with a received tensor, reads its values, keeps it, or changes a
weight in another way, the loaders run in every sync. `obstacle` says why.

Tensors may have any shape.
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.weights.receive.coverage import LoadCoverage, span

NamedTensors: TypeAlias = Sequence[tuple[str, torch.Tensor]]
Span: TypeAlias = tuple[int, int]  # the address of the first byte, and of the byte after the last one
_CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class _Copy:
    """One copy into `target`, a part of a weight, from a part of a received tensor.

    `size`, `stride` and `offset` (elements) are those of the part; `whole`: it is the tensor as received.
    """

    target: torch.Tensor
    whole: bool
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a received tensor that is copied."""
        if self.whole:
            return tensor
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Recorded:
    """All copies from one received tensor, which are right for this shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype
    copies: tuple[_Copy, ...]

    def fits(self, tensor: torch.Tensor) -> bool:
        return tensor.shape == self.shape and tensor.dtype == self.dtype


class RecordedCopies:
    """Loads tensors with `load`, which runs vLLM's loaders, or repeats the copies that it made for the same names."""

    def __init__(self, load: Callable[[NamedTensors], None]) -> None:
        self._load = load
        self._recorded: dict[str, _Recorded] = {}
        self._written: list[Span] = []
        self._weights: object = None
        self._complete = False
        self.obstacle: str | None = None
        self.repeated = False  # whether no loader has been called in this sync

    def start(self, model: torch.nn.Module) -> None:
        """Begin a sync. Forget what was recorded if weights of the model have another place in memory since then."""
        weights = [(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in model.named_parameters()]
        weights += [(name, tensor.data_ptr(), tensor.nbytes) for name, tensor in model.named_buffers()]
        if weights != self._weights or not self._complete:
            self.forget()
            self._weights, self.obstacle = weights, None
        self.repeated = self._complete and self.obstacle is None

    def load(self, tensors: NamedTensors, coverage: LoadCoverage | None = None) -> None:
        """Load whole tensors, in the same or another order than before.

        Tensors that were not recorded are loaded by the loaders, and the next sync is recorded again.
        `coverage`: counts what the loaders write; copies that are repeated are not counted.
        """
        if self.repeated and all(self._fits(name, tensor) for name, tensor in tensors):
            self._repeat(tensors)
        elif self.obstacle is None and not self._complete:
            self._record(tensors, coverage)
        else:
            self.repeated = False
            with contextlib.nullcontext() if coverage is None else coverage.watch():
                self._load(tensors)

    def finish(self) -> None:
        """End a sync that succeeded. From now on its copies are repeated, if no two of them have the same target."""
        if self._complete and self.obstacle is None:
            self._complete = self.repeated
            return
        self._written.sort()
        if any(before[1] > after[0] for before, after in pairwise(self._written)):
            self._refuse("two tensors are loaded into the same place")
        self._complete = True

    def _fits(self, name: str, tensor: torch.Tensor) -> bool:
        recorded = self._recorded.get(name)
        return recorded is not None and recorded.fits(tensor)

    def _repeat(self, tensors: NamedTensors) -> None:
        plain: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        others: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])  # one of them would slow down the whole list
        for name, tensor in tensors:
            for copy in self._recorded[name].copies:
                source = copy.source(tensor)
                is_plain = source.dtype == copy.target.dtype and (copy.whole or source.is_contiguous())
                targets, sources = plain if is_plain else others
                targets.append(copy.target)
                sources.append(source)
        for targets, sources in (plain, others):
            if targets:
                torch._foreach_copy_(targets, sources)

    def _record(self, tensors: NamedTensors, coverage: LoadCoverage | None) -> None:
        users = [tensors_on(tensor) for _, tensor in tensors]
        with _Recorder(tensors, self._written, coverage) as recorder:
            self._load(tensors)
        # A broadcast that has just ended may give up the buffer meanwhile, so there may be fewer than before.
        if any(tensors_on(tensor) > count for count, (_, tensor) in zip(users, tensors, strict=True)):
            recorder.refuse("a loader keeps a received tensor")
        for name, tensor in tensors:
            self._recorded[name] = _Recorded(tensor.shape, tensor.dtype, tuple(recorder.copies[name]))
        if recorder.obstacle is not None:
            self._refuse(recorder.obstacle)

    def _refuse(self, obstacle: str) -> None:
        self.forget()
        self.obstacle = obstacle

    def forget(self) -> None:
        """Let the next sync run the loaders and record them again."""
        self._recorded, self._written, self._complete = {}, [], False


class _Recorder(TorchDispatchMode):
    """Records the copies from received tensors while loaders run; `obstacle`: the first operation that is no copy.

    It runs at each operation of tens of thousands of loaders, so the most frequent ones come first.
    """

    def __init__(self, tensors: NamedTensors, written: list[Span], coverage: LoadCoverage | None) -> None:
        """`coverage`: counts all writes too. A second mode of its own would double the cost of each operation."""
        super().__init__()
        self._coverage = coverage
        self._views: dict[OpOverload, bool] = {}  # by operation
        self.copies: dict[str, list[_Copy]] = {name: [] for name, _ in tensors}
        self.obstacle: str | None = None
        self._sources = sorted((*span(tensor), name) for name, tensor in tensors if tensor.numel())
        self._starts = [start for start, _, _ in self._sources]
        self._received = dict(tensors)
        self._written = written

    def refuse(self, obstacle: str) -> None:
        """Note why the copies cannot be repeated."""
        self.obstacle = self.obstacle or obstacle

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # loaders are not compiled; torch would wrap `__torch_dispatch__` in a context manager for that

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if (is_view := self._views.get(func)) is None:
            is_view = self._views[func] = func.is_view and not func._schema.is_mutable
        if not is_view:
            self._note(func, args, kwargs)
        return func(*args, **kwargs) if kwargs else func(*args)

    def _note(self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        """Record an operation that may read or write memory, before it runs."""
        if func is torch.ops.aten.copy_.default and self._find(args[0]) is None:
            if (name := self._find(args[1])) is not None:
                self._copy(args[0], args[1], name)
            else:
                self.refuse(f"a loader changes tensors by {func}")
        else:
            received = [name for each in _tensors(args, kwargs) if (name := self._find(each)) is not None]
            if func in _CONSTANTS and not received:
                self._constant(args[0])
            elif received:
                self.refuse(f"a loader computes {func} with {received[0]}")
            elif func._schema.is_mutable:
                self.refuse(f"a loader changes tensors by {func}")
        if self._coverage is not None:
            self._coverage.note(func, args)

    def _find(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the received tensor that this one is a part of."""
        if not tensor.numel() or tensor.is_meta:
            return None
        address = tensor.data_ptr()
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._sources[place][1]:
            return None
        return self._sources[place][2]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, name: str) -> None:
        received = self._received[name]
        if target.shape != source.shape or source.dtype != received.dtype or not target.is_contiguous():
            self.refuse(f"a loader copies {name} in another shape or dtype")
            return
        plain = torch.empty(0, dtype=target.dtype, device=target.device)
        plain.set_(target.untyped_storage(), target.storage_offset(), target.size(), target.stride())
        offset = (source.data_ptr() - received.data_ptr()) // source.element_size()
        size, stride = tuple(source.shape), source.stride()
        whole = offset == 0 and size == tuple(received.shape) and stride == received.stride()
        self.copies[name].append(_Copy(plain, whole, size, stride, offset))
        if target.numel():
            start = target.data_ptr()
            self._written.append((start, start + target.numel() * target.element_size()))

    def _constant(self, target: torch.Tensor) -> None:
        """Accept padding, which keeps its value: no copy may have written there before."""
        if not target.numel():
            return
        start, stop = span(target)
        if any(start < end and begin < stop for begin, end in self._written):
            self.refuse("a loader overwrites a received tensor with a constant")


def _tensors(*containers: object) -> Iterator[torch.Tensor]:
    return (each for each in tree_leaves(containers) if isinstance(each, torch.Tensor))


def tensors_on(buffer_B: torch.Tensor) -> int:
    """Return the number of tensors that share the buffer's storage, the buffer included."""
    return int(torch._C._storage_Use_Count(buffer_B.untyped_storage()._cdata)) - 1
