"""Limits what the workers of an engine unpickle from each other's gloo sockets, by exact names.

vLLM 0.32 calls torch's object collectives when an engine with `tensor_parallel` starts, and after it has captured CUDA
graphs: to compare names (parallel_state.py:2602, cpu_communicator.py:77), for handles of memory that GPUs share
(custom_all_reduce.py:491,745: numbers and tensors; FlashInfer 0.7's comm/cuda_ipc.py: a structure of 128 bytes), for
what FlashInfer is tuned to (warmup/kernel_warmup.py:400,471, flashinfer_autotune_cache.py:81; FlashInfer's
comm_backend.py:137,153: text, numbers, booleans, host names and bytes), and to hand out the message queue through which
one worker sends commands to the others (shm_broadcast.py:1124). A worker that reads this queue unpickles its content
without a limit. So a queue that a stranger could fill is refused: it must be this user's, on this host.
"""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from megarl.common.rundir.private_directory import SHARED_MEMORY, is_own
from megarl.common.trust.object_guard import TENSORS, GuardedUnpickler

_QUEUE = ("vllm.distributed.device_communicators.shm_broadcast", "Handle")
_NAMES = TENSORS | {
    "_ctypes": ("_unpickle",),  # it fills an object of a class that is itself looked up here
    "flashinfer.comm.cuda_ipc": ("cudaIpcMemHandle_t",),
}


class EngineUnpickler(GuardedUnpickler):
    """An unpickler that finds plain data, tensors and queues of this host and user."""

    names: ClassVar[Mapping[str, tuple[str, ...]]] = _NAMES
    what: ClassVar[str] = "what an engine's workers exchange"

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as the base class
        """Return a class that workers exchange. Raises UnpicklingError for any other name."""
        return _own_queue() if (module, name) == _QUEUE else super().find_class(module, name)


def _own_queue() -> type:
    """Return a class in place of vLLM's, which makes no queue without a check of where it is."""
    from vllm.distributed.device_communicators.shm_broadcast import Handle

    class OwnQueue(Handle):  # type: ignore[misc]  # without vLLM's types it is Any
        def __init__(self, *_: object, **__: object) -> None:
            raise pickle.UnpicklingError("a message queue was made from arguments, as vLLM never does")

        def __setstate__(self, state: dict[str, Any]) -> None:
            state = dict(state)
            _check_queue(state)
            self.__dict__.update(state)

    return OwnQueue


def _check_queue(state: Mapping[str, Any]) -> None:
    """Raise UnpicklingError if a part of the queue is not this user's, or not on this host."""
    parts = [_socket(state.get(key)) for key in ("local_subscribe_addr", "local_notify_addr")]
    parts += [_memory(state.get(key)) for key in ("buffer_handle", "tensor_arena_handle")]
    if state.get("remote_subscribe_addr") is not None or not all(parts):
        raise pickle.UnpicklingError(
            f"a message between an engine's workers names a queue of another user or host: {dict(state)}. It was not "
            f"opened"
        )


def _socket(address: object) -> bool:
    import vllm.envs

    if address is None:
        return True
    directory, _, name = str(address).removeprefix("ipc://").rpartition("/")
    path = Path(vllm.envs.VLLM_RPC_BASE_PATH) / name
    return address == f"ipc://{path}" and directory == str(path.parent) and is_own(path)


def _memory(handle: object) -> bool:
    if handle is None:
        return True
    name = handle[-1] if isinstance(handle, tuple) and handle else None
    return isinstance(name, str) and "/" not in name and is_own(SHARED_MEMORY / name)
