"""Limits what torch's own object collectives unpickle to the classes of checkpoint plans, by exact names.

megarl's ranks exchange MessagePack (`object_collectives.py`). Megatron-Core and torch still call torch's object
collectives: for the parameter groups of an optimizer, and to plan, check and load a sharded checkpoint. Those unpickle
what comes out of a socket (torch 2.13, distributed_c10d.py:3435).
"""

from __future__ import annotations

import importlib
import io
import pickle
from typing import Any

_DTYPES = ("bfloat16", "float16", "float32", "float64", "int32", "int64", "uint8", "bool")
# Classes of plain data, and functions that only look up a name or lay out a tensor. There are no dotted names.
_NAMES: dict[str, tuple[str, ...]] = {
    "_io": ("BytesIO",),
    "collections": ("OrderedDict",),
    "megatron.core.dist_checkpointing.mapping": ("ShardedObject", "ShardedTensor"),
    "torch": ("Size", *_DTYPES),
    "torch._utils": ("_rebuild_tensor_v2",),
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
}


class GuardedUnpickler(pickle.Unpickler):
    """An unpickler that finds the classes of checkpoint plans and nothing else."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # as the base class
        """Return a class that a checkpoint plan may hold. Raises UnpicklingError for any other name."""
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage  # torch's own would unpickle the bytes without a limit
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(
                f"a message between ranks holds {module}.{name}, which is no part of a checkpoint plan: it is not from "
                "a rank of this run, or a library sends more than it did. It was not unpickled"
            )
        return getattr(importlib.import_module(module), name)


def guard_object_collectives() -> None:
    """Make torch's object collectives refuse everything else in this process. Idempotent."""
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d, "_unpickler"):
        raise RuntimeError("this version of torch has no distributed_c10d._unpickler, which has to be guarded")
    distributed_c10d._unpickler = GuardedUnpickler  # type: ignore[misc,assignment]


def _load_storage(content: bytes) -> Any:  # noqa: ANN401  # a storage of torch, typed or not
    """Return the storage of a tensor that was pickled outside `torch.save`."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)
