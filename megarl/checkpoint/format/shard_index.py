"""Parses `.metadata`, torch's index of a checkpoint's shards, without running any of its content.

The file is a pickle, which names the functions that build its content. torch and Megatron-Core unpickle it without
restriction. Here each name that they write becomes an inert record, and any other name is an error. The records are
then checked and converted to torch's classes.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.common.files import inside
from megarl.models.hf.model_files import SHARD_INDEX


def load_plain(file: Path | io.BytesIO) -> Any:  # noqa: ANN401  # whatever was saved
    """Return the plain content of `file`. Raises ValueError with a short reason if it is damaged or has other objects.

    Uses torch's restricted unpickler, whose list of names Megatron-Core extends with a few plain classes.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as error:  # the error that torch raises depends on the content
        # torch replaces the reason with advice to turn the restriction off.
        reason = str(error.__context__ or error).strip() or type(error).__name__
        raise ValueError(reason.splitlines()[0]) from error


_METADATA = "torch.distributed.checkpoint.metadata"
_PLANNER = "torch.distributed.checkpoint.planner"
# The classes of an index, by module and exact name. Megatron-Core adds the plans of the save; up to 0.15 it wrote its
# own classes.
_RECORDS = {
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_METADATA, "StorageMeta"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_PLANNER, "SavePlan"),
    (_PLANNER, "WriteItem"),
    (_PLANNER, "WriteItemType"),
    (_PLANNER, "TensorWriteData"),
    (_PLANNER, "BytesIOWriteData"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
_DTYPES = {
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint8", "bool",
}  # fmt: skip


def read_metadata(step: Path) -> Metadata:
    """Return the index of the checkpoint directory `step`: tensors, objects, and the place of each part.

    Raises ValueError if the file is damaged, is not an index, or names a file outside `step`.
    """
    path = step / SHARD_INDEX
    content = inside(step, SHARD_INDEX).read_bytes()
    try:
        found = _IndexUnpickler(io.BytesIO(content)).load()
        if _kind(found) not in ("Metadata", "MCoreMetadata"):
            raise ValueError("it is not an index")
        fields = _fields(found)
        names: set[str] = set()
        stored = dict(_storage(fields["storage_data"], names))
        entries = {_text(key): _entry(value) for key, value in fields["state_dict_metadata"].items()}
    except Exception as error:  # the error that pickle raises depends on the damage
        raise ValueError(f"{path} is not a readable index of torch.distributed.checkpoint: {error}") from error
    for name in names:
        try:
            inside(step, name)
        except ValueError as error:
            raise ValueError(f"{path} is refused: {error}") from None
    return Metadata(entries, storage_data=stored, storage_meta=StorageMeta())


class _Record:
    """Keeps the arguments and the state that a pickle gives to an object, unused."""

    arguments: tuple[object, ...] = ()
    state: object = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles `.metadata` into records and plain values; raises UnpicklingError for any other name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # New classes for each file, because a pickle can change the attributes of classes that it names.
        self._known: dict[tuple[str, str], object] = {pair: type(pair[1], (_Record,), {}) for pair in _RECORDS}
        self._known |= {("torch", name): getattr(torch, name) for name in _DTYPES}
        self._known |= {
            ("torch", "Size"): _new_size(),
            ("collections", "OrderedDict"): dict,
            ("collections", "defaultdict"): type("defaultdict", (dict,), {"__init__": lambda self, *_: None}),
        }

    def find_class(self, module: str, name: str) -> object:
        found = self._known.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which is not part of an index")
        return found


def _new_size() -> Callable[[Sequence[int]], tuple[int, ...]]:
    def size(items: Sequence[int]) -> tuple[int, ...]:
        return tuple(items)

    return size


def _kind(record: object) -> str:
    return type(record).__name__ if isinstance(record, _Record) else ""


def _fields(record: Any) -> dict[str, Any]:  # noqa: ANN401  # whatever the file holds
    """Return a record's attributes. Raises ValueError if it is not a record or has none."""
    if not isinstance(record, _Record) or not isinstance(record.state, dict):
        raise ValueError(f"it holds a {type(record).__name__} where a record is expected")
    return record.state


def _storage(stored: dict[Any, Any], names: set[str]) -> Iterator[tuple[MetadataIndex, _StorageInfo]]:
    """Yield the place of each part, and add the files' names to `names`."""
    for index, info in stored.items():
        where, place = _fields(index), _fields(info)
        if place.get("transform_descriptors"):
            raise ValueError("its shards are compressed, which is not supported")
        offset = where.get("offset")
        names.add(name := _text(place["relative_path"]))
        yield (
            MetadataIndex(_text(where["fqn"]), None if offset is None else _sizes(offset), where.get("index")),
            _StorageInfo(name, _size(place["offset"]), _size(place["length"])),
        )


def _entry(value: object) -> TensorStorageMetadata | BytesStorageMetadata:
    if _kind(value) == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(value)
    state = getattr(fields["properties"], "state", None)
    dtype = state["dtype"] if isinstance(state, dict) else state[0] if isinstance(state, tuple) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor has the dtype {dtype!r}")
    chunks = [
        ChunkStorageMetadata(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))
        for chunk in map(_fields, fields["chunks"])
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _sizes(fields["size"]), chunks)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it holds {value!r} where a name is expected")
    return value


def _size(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"it holds {value!r} where a size is expected")
    return value


def _sizes(values: object) -> torch.Size:
    if not isinstance(values, tuple | list):
        raise ValueError(f"it holds {values!r} where a shape is expected")
    return torch.Size([_size(value) for value in values])
