"""Emulations of the CUDA calls of Megatron-Core on a CPU, and the reason for each.

`EMULATIONS` is the complete list. Nothing is installed if CUDA is present. An emulation replaces only calls that would
otherwise raise: `device="cuda"` means the CPU, streams and events do nothing (a CPU executes in order), and the CUDA
random state is that of the CPU generator.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
SplitSizes: TypeAlias = Sequence[int] | Tensor | None
FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange")


@dataclass(frozen=True)
class Emulation:
    """One emulated call: its name, where Megatron-Core uses it, why a CPU needs it, and the function to install it."""

    name: str
    where: str
    reason: str
    install: Callable[[], None]


def install() -> None:
    """Install every emulation; call it once. Raises RuntimeError if CUDA is present."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU emulation must not be installed where CUDA is present")
    for emulation in EMULATIONS:
        emulation.install()
    # These are hints about CUDA settings, and about deprecated torch functions that Megatron-Core calls.
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _install_jit_fuser() -> None:
    if "megatron.core" in sys.modules:  # it was imported before, so its functions are already compiled ones
        torch.compiler.set_stance("force_eager")
    original = torch.compile
    torch.compile = lambda function, *args, **kwargs: function  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # six warnings that Transformer Engine and Apex are not installed
            import megatron.core
    finally:
        torch.compile = original
    from megatron.core import jit

    jit.disable_jit_fuser()
    logging.getLogger(__name__).debug("megatron-core %s imported", megatron.core.__version__)


def _install_current_device() -> None:
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]


def _install_factories() -> None:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: object, **kwargs: object) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
                kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    # `with torch.device("meta")` recognises the factories by identity, from a list that its first use creates. The list
    # must exist before the wrappers do: otherwise the context has no effect, and transformers' RoPE buffers are wrong.
    from torch.utils import _device

    _device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _install_tensor_cuda() -> None:
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]


def _install_tensor_type() -> None:
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: torch.dtype | str | None = None, **kwargs: bool) -> torch.Tensor | str:
        if dtype is not None:
            return original(self, dtype, **kwargs)
        name = original(self)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("megatron.core.optimizer"):
            return name.replace("torch.", "torch.cuda.", 1)
        return name

    torch.Tensor.type = type_name  # type: ignore[assignment, method-assign]


def _install_rng() -> None:
    from megatron.core.tensor_parallel import random

    def get_state(*args: object, **kwargs: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, *args: object, **kwargs: object) -> None:
        torch.set_rng_state(new_state)

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_state  # type: ignore[assignment]

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(int(seed))

    torch.cuda.manual_seed = torch.cuda.random.manual_seed = manual_seed
    random._set_cuda_rng_state = set_state
    # Both states are one generator here, so the tracker's warning "CPU RNG state changed" is always wrong.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


class _NoStream:
    """Stands for a stream or an event of a device that executes in order."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record_event(self, event: _NoStream | None = None) -> _NoStream:
        return event or _NoStream()

    def record(self, stream: _NoStream | None = None) -> None: ...

    def wait(self, stream: _NoStream | None = None) -> None: ...

    def wait_stream(self, stream: _NoStream) -> None: ...

    def wait_event(self, event: _NoStream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def _install_streams() -> None:
    default = _NoStream()

    @contextlib.contextmanager
    def stream(_: _NoStream | None) -> Iterator[None]:
        yield

    torch.cuda.Stream = torch.cuda.Event = _NoStream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda device=None: default  # type: ignore[assignment, return-value, misc]
    torch.cuda.stream = stream  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment, method-assign]


def _install_synchronize() -> None:
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.reset_peak_memory_stats = lambda device=None: None


def _install_nvtx() -> None:
    torch.cuda.nvtx.range_push = lambda message: 0
    torch.cuda.nvtx.range_pop = lambda: 0


def _install_uneven_collectives() -> None:
    from megatron.core.tensor_parallel import mappings

    original_gather = mappings._gather_along_first_dim
    original_scatter = mappings._reduce_scatter_along_first_dim

    @functools.wraps(original_gather)
    def gather(
        input_: Tensor, group: ProcessGroup, output_split_sizes: SplitSizes = None, use_global_buffer: bool = False
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return original_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(original_scatter)
    def scatter(
        input_: Tensor, group: ProcessGroup, input_split_sizes: SplitSizes = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return original_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter


EMULATIONS: tuple[Emulation, ...] = (
    Emulation(
        "jit_fuser", "jit.py and its users (activations, fusions, router)",
        "torch.compile would build C++ at run time for very small functions; they run eagerly instead",
        _install_jit_fuser,
    ),
    Emulation(
        "current_device",
        "tensor_parallel/layers.py, mappings.py, p2p_communication.py, param_and_grad_buffer.py, "
        "rotary_pos_embedding.py, optimizer.py",
        "torch.cuda.current_device() is used as a tensor device; it is the CPU", _install_current_device,
    ),
    Emulation(
        "factories",
        "schedules.py, optimizer.py, clip_grads.py, grad_scaler.py, data.py, transformer/utils.py",
        "device='cuda' in tensor factories means the CPU", _install_factories,
    ),
    Emulation(
        "tensor_cuda", "language_module.py, rope_utils.py, data.py, grad_scaler.py",
        "Tensor.cuda() and Module.cuda() return the object as it is", _install_tensor_cuda,
    ),
    Emulation(
        "tensor_type", "optimizer.py, distrib_optimizer.py, clip_grads.py",
        "they test type() == 'torch.cuda.FloatTensor'; only the optimizer's files get that name",
        _install_tensor_type,
    ),
    Emulation(
        "rng", "tensor_parallel/random.py, rerun_state_machine.py",
        "the CUDA random state is that of the CPU generator", _install_rng,
    ),
    Emulation(
        "streams",
        "token_dispatcher.py, shared_experts.py, distributed_data_parallel.py, param_and_grad_buffer.py",
        "streams and events do nothing: a CPU executes in order", _install_streams,
    ),
    Emulation(
        "synchronize", "p2p_communication.py, parallel_state.py, timers.py, distributed_data_parallel.py",
        "there is nothing to wait for", _install_synchronize,
    ),
    Emulation(
        "nvtx", "utils.py, pipeline_parallel/utils.py", "profiler ranges do nothing", _install_nvtx,
    ),
    Emulation(
        "uneven_collectives", "mappings.py (token dispatcher with EP > 1 and ETP > 1)",
        "gloo's all_gather and reduce_scatter need equal sizes (NCCL's do not); pad, or reduce and slice",
        _install_uneven_collectives,
    ),
)  # fmt: skip
