"""Limits what torch's own object collectives unpickle to the classes of checkpoint plans, by exact names.

megarl's ranks exchange MessagePack (`object_collectives.py`). Megatron-Core and torch still call torch's object
collectives: for the parameter groups of an optimizer, and to plan, check and load a sharded checkpoint. Those unpickle
what comes out of a socket (torch 2.13, distributed_c10d.py:3435). When a rank fails, torch sends its exception with the
traceback to the other ranks. Here it travels as a RuntimeError with the class and the text, because no other class of
exceptions is admitted, and without its traceback. What engines exchange is another list
(`megarl/weights/receive/engine_guard.py`).
"""

import importlib
import io
import pickle
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool")
# Classes of plain data, and functions that only look up a name or lay out a tensor. There are no dotted names.
TENSORS: dict[str, tuple[str, ...]] = {
    "builtins": ("RuntimeError",),
    "collections": ("OrderedDict",),
    "torch": ("Size", *_DTYPES),
    "torch._utils": ("_rebuild_tensor_v2",),
}
_NAMES: dict[str, tuple[str, ...]] = TENSORS | {
    "_io": ("BytesIO",),
    "megatron.core.dist_checkpointing.mapping": ("ShardedObject", "ShardedTensor"),
    "torch.distributed.checkpoint.api": ("CheckpointException",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": (
        "LoadItemType",
        "LoadPlan",
        "ReadItem",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    ),
    "torch.distributed.checkpoint.storage": ("WriteResult",),
    "torch.serialization": ("_get_layout",),
    "traceback": ("StackSummary",),
}
# The names under which a storage is sent: torch's, and that with which Megatron-Core replaces it.
_STORAGE_LOADERS = (
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),
)


class FailurePickler(pickle.Pickler):
    """A pickler that sends each exception as one of the classes that `GuardedUnpickler` admits."""

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401  # as the base class
        """Return the class and the arguments of what is sent for `value`; NotImplemented: as every pickler does."""
        from torch.distributed.checkpoint import CheckpointException

        if isinstance(value, CheckpointException):
            return CheckpointException, value.args  # the step and each failed rank's exception
        if isinstance(value, BaseException):
            text = "".join(traceback.format_exception_only(value)).strip()
            return RuntimeError, (text if type(value) is not RuntimeError else str(value),)
        if isinstance(value, traceback.StackSummary):
            return traceback.StackSummary, ()  # its frames may hold code, and paths of this rank
        return NotImplemented


class GuardedUnpickler(pickle.Unpickler):
    """An unpickler that finds the classes of checkpoint plans and nothing else."""

    names: ClassVar[Mapping[str, tuple[str, ...]]] = _NAMES
    what: ClassVar[str] = "a checkpoint plan"

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as the base class
        """Return a class that a checkpoint plan may hold. Raises UnpicklingError for any other name."""
        if (module, name) in _STORAGE_LOADERS:
            return _load_storage  # torch's own would unpickle the bytes without a limit
        if name not in self.names.get(module, ()):
            raise pickle.UnpicklingError(
                f"a message between ranks holds {module}.{name}, which is no part of {self.what}: it is not from "
                "a rank of this run, or a library sends more than it did. It was not unpickled"
            )
        return getattr(importlib.import_module(module), name)


def guard_object_collectives(unpickler: type[GuardedUnpickler] = GuardedUnpickler) -> None:
    """Make torch's object collectives in this process refuse everything else, and send failures in this form.
    Idempotent.
    """
    from torch.distributed import distributed_c10d

    for name in ("_pickler", "_unpickler"):
        if not hasattr(distributed_c10d, name):
            raise RuntimeError(f"this version of torch has no distributed_c10d.{name}, which has to be guarded")
    distributed_c10d._pickler = FailurePickler  # type: ignore[misc,assignment]
    distributed_c10d._unpickler = unpickler  # type: ignore[misc,assignment]


def _load_storage(content: bytes) -> Any:  # noqa: ANN401  # a storage of torch, typed or not
    """Return the storage of a tensor that was pickled outside `torch.save`."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)
