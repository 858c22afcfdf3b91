"""Parks the trainer's state in host memory while an engine uses the GPU, and restores it bit for bit.

Weights, main weights and Adam's moments are parked by storage: each distinct storage is copied to a block of host
memory, resized to 0, and later refilled in place. All views of it (parameters, shards of the distributed optimizer, DDP
buckets) share the storage, so nothing has to be reattached; only finding the tensors depends on Megatron's classes.
Gradients are dropped and return as zeros. The same calls run on CPU and GPU.

Shapes: B bytes of a storage.
"""

import gc
import mmap
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

from megarl import platforms
from megarl.common.errors import WeightSyncError
from megarl.common.process.memory_tuning import anonymous_bytes, return_freed_memory
from megarl.common.values import GIB

Part: TypeAlias = Literal["weights", "gradients", "optimizer", "frozen"]
NOTHING: frozenset[Part] = frozenset()
WEIGHTS: frozenset[Part] = frozenset({"weights"})
EVERYTHING: frozenset[Part] = frozenset({"weights", "gradients", "optimizer", "frozen"})


@dataclass
class _Parked:
    """A storage without memory; `content_B` is None if its content was dropped."""

    part: Part
    storage: UntypedStorage
    nbytes: int
    content_B: Tensor | None


class StateMemory:
    """Memory of a rank's model, optimizer and frozen models. Not collective. `resident`: the parts on the device."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        frozen: Sequence[torch.nn.Module] = (),
        before: int = 0,
    ) -> None:
        """`frozen`: other models, of which only tensors that stay on the device are moved.

        `before`: this process's anonymous memory, in bytes, before it built any of these.
        """
        self._before = before
        self._chunks, self._optimizer, self._frozen = chunks, optimizer, frozen
        self._blocks: dict[int, tuple[UntypedStorage, Tensor]] = {}  # by storage; each is allocated once
        self._parked: list[_Parked] = []
        self.resident: frozenset[Part] = EVERYTHING

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory allocated for parked contents so far; they are kept."""
        return sum(content_B.numel() for _, content_B in self._blocks.values())

    @property
    def device_bytes(self) -> int:
        """Bytes that torch's allocator has reserved on the GPU; on a CPU this process's growth since `before`."""
        if platforms.current().is_cuda:
            return torch.cuda.memory_reserved()
        return max(0, anonymous_bytes() - self._before)

    def hold(self, wanted: Collection[Part]) -> int:
        """Keep exactly these parts on the device; return the bytes copied.

        A returning part has its former content; gradients are zero.
        """
        kept = frozenset(wanted)
        leaving, coming = self.resident - kept, kept - self.resident
        copied = (self._park(leaving) if leaving else 0) + (self._restore(coming) if coming else 0)
        self.resident = kept
        return copied

    def await_room(self, timeout_s: float, ending: Sequence[str]) -> None:
        """Wait until the GPU has room for what is parked, because engines are `ending` whose actors are already gone.

        Raises WeightSyncError after `timeout_s`. On a CPU it does nothing.
        """
        needed, deadline = sum(each.nbytes for each in self._parked), time.monotonic() + timeout_s
        while platforms.current().is_cuda and (free := torch.cuda.mem_get_info()[0]) < needed:
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"the trainer waited {timeout_s:.0f} s (timeouts.rpc_s) for {', '.join(ending)} to release a GPU: "
                    f"{free / GIB:.2f} GiB of it are free, and its state takes {needed / GIB:.2f} GiB"
                )
            time.sleep(0.1)

    def require(self, wanted: Collection[Part] = EVERYTHING) -> None:
        """Raise RuntimeError unless these parts are on the device."""
        if missing := frozenset(wanted) - self.resident:
            raise RuntimeError(f"the trainer's {', '.join(sorted(missing))} are parked in host memory")

    @torch.no_grad()
    def _park(self, parts: frozenset[Part]) -> int:
        if "gradients" in parts:
            self._optimizer.zero_grad()  # main weights may refer to their own gradients
            _forget_passes()
            gc.collect()  # modules may hold the last pass's activations in reference cycles
        found = list(self._storages(parts))
        for _, storage in found:
            if not storage.resizable():
                raise RuntimeError(f"a storage of {storage.nbytes()} bytes of the trainer's state cannot be freed")
        parked = [
            _Parked(part, storage, storage.nbytes(), None if part == "gradients" else self._block(storage))
            for part, storage in found
        ]
        copied = 0
        for each in parked:
            if each.content_B is not None:
                each.content_B.copy_(_content(each.storage), non_blocking=True)
                copied += each.nbytes
        _synchronize()
        for each in parked:
            each.storage.resize_(0)
        self._parked += parked
        _return_memory()
        return copied

    @torch.no_grad()
    def _restore(self, parts: frozenset[Part]) -> int:
        coming = [each for each in self._parked if each.part in parts]
        copied = 0
        for each in coming:
            each.storage.resize_(each.nbytes)
            if each.content_B is None:
                _content(each.storage).zero_()
            else:
                _content(each.storage).copy_(each.content_B, non_blocking=True)
                copied += each.nbytes
        _synchronize()
        self._parked = [each for each in self._parked if each.part not in parts]
        return copied

    def _block(self, storage: UntypedStorage) -> Tensor:
        """Return a storage's block of host memory [B], allocated when it is first parked."""
        if storage._cdata not in self._blocks:
            self._blocks[storage._cdata] = storage, host_block(storage.nbytes())
        return self._blocks[storage._cdata][1]

    def _storages(self, parts: frozenset[Part]) -> Iterator[tuple[Part, UntypedStorage]]:
        """Yield the distinct storages of these parts. A shared storage belongs to the first of its parts."""
        device, seen = platforms.current().device.type, set[int]()
        for part, tensors in self._tensors():
            for tensor in tensors:
                storage = tensor.untyped_storage()
                # Scalars, such as Adam's step, stay where they are.
                if tensor.device.type == device and tensor.numel() > 1 and storage._cdata not in seen:
                    seen.add(storage._cdata)
                    if part in parts:
                        yield part, storage

    def _tensors(self) -> Iterator[tuple[Part, Iterable[Tensor]]]:
        for chunk in self._chunks:
            buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
            yield "weights", [each.param_data for each in buffers if each.param_data is not None]
            yield "weights", [parameter.data for parameter in chunk.parameters()]
            yield "gradients", [each.grad_data for each in buffers]
        for each in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            if each.optimizer is None:  # the rank has no parameter of its kind
                continue
            yield "optimizer", [weight.data for group in each.optimizer.param_groups for weight in group["params"]]
            values = (value for state in each.optimizer.state.values() for value in state.values())
            yield "optimizer", [value for value in values if torch.is_tensor(value)]
        yield "frozen", [tensor.data for module in self._frozen for tensor in module.parameters()]


def host_block(nbytes: int) -> Tensor:
    """Return new pinned host memory [B].

    It is an anonymous file, so its size is exact (torch's pinned allocator rounds up to a power of two) and it does not
    count as the process's anonymous memory.
    """
    file = os.memfd_create("megarl-parked")
    try:
        os.ftruncate(file, nbytes)
        block_B = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8)
    finally:
        os.close(file)
    if platforms.current().is_cuda:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(block_B.data_ptr(), nbytes, 0))
    return block_B


def _content(storage: UntypedStorage) -> Tensor:
    """Return the whole storage as bytes [B]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _forget_passes() -> None:
    """Drop the tensors that libraries keep of past passes. Each may be a part of a large segment of torch's allocator,
    which keeps the whole segment then.
    """
    for rope in (RotaryEmbedding, YarnRotaryEmbedding):  # angles, by the longest sequence of a micro-batch
        rope.forward.cache_clear()
    engine: Any = sys.modules.get("transformer_engine.pytorch.module.base")
    if engine is not None:  # what stands for a weight's gradient that is already in DDP's buffer, of the weight's size
        engine._dummy_wgrads.clear()


def _synchronize() -> None:
    if platforms.current().is_cuda:
        torch.cuda.synchronize()


def _return_memory() -> None:
    """Return freed memory to the system, so that another process can use it."""
    if platforms.current().is_cuda:
        torch.cuda.empty_cache()
    else:
        return_freed_memory()
