"""Emulations of Megatron-Core's CUDA calls on a CPU, and the reason for each.

`EMULATIONS` lists all functions that install one; each says where Megatron-Core uses it. None is installed if CUDA is
present. Emulations replace only calls that would otherwise raise: `device="cuda"` means the CPU, streams and events do
nothing (a CPU executes in order), and the CUDA random state is the CPU generator's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

_CPU = torch.device("cpu")
SplitSizes: TypeAlias = Sequence[int] | Tensor | None
FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange")


def install() -> None:
    """Install every emulation; call it once. Raises RuntimeError if CUDA is present."""
    if torch.cuda.is_available():
        raise RuntimeError("the CPU emulation must not be installed if CUDA is present")
    for install_one in EMULATIONS:
        install_one()
    # Hints about CUDA settings, and about deprecated torch functions that Megatron-Core calls.
    warnings.filterwarnings("ignore", module=r"megatron\.core\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _install_jit_fuser() -> None:
    """Run jitted functions eagerly: torch.compile would build C++ at run time for tiny functions.

    Used in jit.py and its users (activations, fusions, router).
    """
    if "megatron.core" in sys.modules:  # imported before, so its functions are already compiled
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
    """Return the CPU as the current device, which Megatron-Core uses as the device of tensors.

    Used in tensor_parallel/layers.py, mappings.py, p2p_communication.py, param_and_grad_buffer.py,
    rotary_pos_embedding.py, optimizer.py.
    """
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]


def _install_factories() -> None:
    """Create tensors on the CPU if a factory is called with device="cuda".

    Used in schedules.py, optimizer.py, clip_grads.py, grad_scaler.py, data.py, transformer/utils.py.
    """

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def make(*args: object, **kwargs: object) -> torch.Tensor:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
                kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    # `with torch.device("meta")` recognises factories by identity, from a list created on first use. Create it before
    # the wrappers: otherwise the context has no effect, and transformers' RoPE buffers are wrong.
    from torch.utils import _device

    _device._device_constructors()
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _install_tensor_cuda() -> None:
    """Let Tensor.cuda() and Module.cuda() return the object unchanged.

    Used in language_module.py, rope_utils.py, data.py, grad_scaler.py.
    """
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment, method-assign]


def _install_tensor_type() -> None:
    """Report CUDA type names to the optimizer's files, which compare type() with "torch.cuda.FloatTensor".

    Used in optimizer.py, distrib_optimizer.py, clip_grads.py.
    """
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
    """Use the CPU generator's state as CUDA's.

    Used in tensor_parallel/random.py, rerun_state_machine.py.
    """
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
    # Both states belong to one generator here, so the tracker's warning "CPU RNG state changed" is always wrong.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


class _NoStream:
    """A stream or event of a device that executes in order."""

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
    """Make streams and events do nothing, because a CPU executes in order.

    Used in token_dispatcher.py, shared_experts.py, distributed_data_parallel.py, param_and_grad_buffer.py.
    """
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
    """Make synchronisation do nothing, because there is nothing to wait for.

    Used in p2p_communication.py, parallel_state.py, timers.py, distributed_data_parallel.py.
    """
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.reset_peak_memory_stats = lambda device=None: None


def _install_nvtx() -> None:
    """Make profiler ranges do nothing. Used in utils.py, pipeline_parallel/utils.py."""
    torch.cuda.nvtx.range_push = lambda message: 0
    torch.cuda.nvtx.range_pop = lambda: 0


def _install_uneven_collectives() -> None:
    """Pad an uneven gather, and reduce and slice an uneven scatter: gloo, unlike NCCL, needs equal sizes.

    Used in mappings.py (token dispatcher with EP > 1 and ETP > 1).
    """
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


EMULATIONS: tuple[Callable[[], None], ...] = (
    _install_jit_fuser,
    _install_current_device,
    _install_factories,
    _install_tensor_cuda,
    _install_tensor_type,
    _install_rng,
    _install_streams,
    _install_synchronize,
    _install_nvtx,
    _install_uneven_collectives,
)
