"""vLLM's CPU worker with a sleep that frees memory and loses its contents, as on a GPU.

vLLM 0.32's own CPU worker ignores sleep and keeps its weights, so a test would pass even if nothing was loaded after a
sleep. This worker behaves like vLLM's allocator on GPUs (device_allocator/cumem.py): addresses stay, pages are freed,
contents are lost. Registered buffers are saved and restored, as at level 2 there. Where a layer computes with a packed
copy of its weight, a function that raises replaces the copy, so an engine that wakes without a load cannot serve.

oneDNN compiles a kernel of about 0.3 MiB for each weight shape and number of tokens in a batch, and keeps it after the
weights are gone. vLLM keeps 32 per weight shape (0.32, model_executor/layers/utils.py) and oneDNN 1,024 in all, so an
engine's memory asleep would grow for a long time. Both limits are small here.

Tensors may have any shape.
"""

import ctypes
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from megarl.common.process.memory_tuning import anonymous_bytes, return_freed_memory

_LIBC = ctypes.CDLL(None, use_errno=True)
_PAGE = os.sysconf("SC_PAGESIZE")
_MADV_DONTNEED = 4  # linux/mman-common.h
_KERNELS = 12  # that oneDNN keeps for each shape of a weight, and in all


class SleepingCPUWorker(CPUWorker):  # type: ignore[misc]  # without vLLM's types it is Any
    """A worker for engines that share their CPU's memory with a trainer; only level 2 is known."""

    _buffers: dict[str, torch.Tensor]
    _before = 0  # bytes, before it had a model

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Make the model."""
        self._before = anonymous_bytes()
        _keep_few_kernels()
        super().load_model(*args, **kwargs)

    def held_bytes(self) -> int:
        """Return the bytes of this process's own memory, without those that it had before it made the model."""
        return max(0, anonymous_bytes() - self._before)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights, buffers and KV cache back."""
        if level != 2:
            raise ValueError(f"this worker sleeps at level 2, not {level}")
        model = self.model_runner.get_model()
        self._buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = _asleep(type(module).__name__)
        give_back([*model.parameters(), *model.buffers(), *self._caches()])
        return_freed_memory()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the buffers, if the weights wake. Their pages, and those of the cache, come when they are written."""
        if tags is None or "weights" in tags:
            for name, buffer in self.model_runner.get_model().named_buffers():
                buffer.copy_(self._buffers[name])
            self._buffers = {}

    def _caches(self) -> Iterator[torch.Tensor]:
        for cache in self.model_runner.kv_caches:
            yield from cache if isinstance(cache, list | tuple) else [cache]


def _keep_few_kernels() -> None:
    """Patch vLLM 0.32 so that oneDNN keeps _KERNELS for each shape of a weight. Idempotent. Call it before the load."""
    from vllm import _custom_ops

    make = _custom_ops.create_onednn_mm
    if hasattr(make, "__wrapped__"):
        return
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS))  # read at oneDNN's first kernel

    @functools.wraps(make)
    def make_small(weight: torch.Tensor, primitive_cache_size: int = _KERNELS) -> Any:  # noqa: ANN401  # a class of vLLM
        return make(weight, min(primitive_cache_size, _KERNELS))

    _custom_ops.create_onednn_mm = make_small


def _asleep(layer: str) -> Callable[..., NoReturn]:
    """Return what stands for a packed copy: a closure, by which `in_place.py` knows that it must be made again."""

    def refuse(*_: Any) -> NoReturn:  # noqa: ANN401  # whatever the layer computes with
        raise RuntimeError(
            f"the weights of a {layer} were lost in the engine's sleep, and none have been loaded since: publish "
            "before it generates"
        )

    return refuse


def give_back(tensors: Iterable[torch.Tensor]) -> int:
    """Lose the contents of the tensors' storages, which then are zeros; return the bytes of whole pages given back."""
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(_give_back(storage.data_ptr(), storage.nbytes()) for storage in storages.values())


def _give_back(start: int, nbytes: int) -> int:
    stop = start + nbytes
    first, last = -(-start // _PAGE) * _PAGE, stop // _PAGE * _PAGE
    if first >= last:
        ctypes.memset(start, 0, nbytes)
        return 0
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, stop - last)
    if _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")
    return last - first
