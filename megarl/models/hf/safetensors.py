"""Reads the headers of Hugging Face safetensors directories, and streams tensors into new files.

Shapes: B bytes of a tensor; other tensors may have any shape.
"""

import json
import os
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megarl.common.files import inside

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
HF_FILE = "model.safetensors"
HF_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorRecord:
    """A tensor as its file's header describes it; `begin` and `end` are byte offsets after the header."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_records(directory: Path) -> dict[str, TensorRecord]:
    """Return all tensors of a directory by name; reads only the headers of its safetensors files.

    Raises ValueError that names file and tensor: no safetensors, a truncated file, a tensor in two files, an index that
    contradicts the files, other weights next to a single-file model, or a file outside the directory.
    """
    path = directory / HF_INDEX
    index = read_weight_map(path) if path.is_file() else None
    names = {file.name for file in directory.glob("*.safetensors")} if index is None else set(index.values())
    _refuse_ambiguous(directory, names, indexed=index is not None)
    files = sorted(inside(directory, name) for name in names)
    if not files:
        pickled = " but pickled weights (*.bin), which can run code when they are loaded" * any(directory.glob("*.bin"))
        raise ValueError(
            f"{directory} has no *.safetensors{pickled}; load the model with transformers and save it again: "
            "save_pretrained writes safetensors"
        )
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ValueError(f"{path} names files that do not exist: {', '.join(missing)}")
    records: dict[str, TensorRecord] = {}
    for file in files:
        for name, record in _read_header(file).items():
            if name in records:
                raise ValueError(f"tensor {name} is in both {records[name].file} and {file}")
            records[name] = record
    if index is not None:
        for name, listed in index.items():
            if name not in records or records[name].file.name != listed:
                raise ValueError(f"{path} says {name} is in {listed}, but it is not")
        if unlisted := sorted(set(records) - set(index)):
            raise ValueError(f"{path} has no entry for {', '.join(unlisted[:5])}")
    return records


def _refuse_ambiguous(directory: Path, names: Collection[str], *, indexed: bool) -> None:
    """Raise ValueError for one weight file next to others: transformers and vLLM would load different files."""
    if not (directory / HF_FILE).is_file() or set(names) == {HF_FILE}:
        return
    if indexed and HF_FILE not in names:
        raise ValueError(
            f"{directory} holds {HF_FILE} and {HF_INDEX}, an index of other files: transformers reads the first, vLLM "
            "the second; remove the stale one"
        )
    if not indexed:
        others = ", ".join(sorted(set(names) - {HF_FILE}))
        raise ValueError(f"{directory} holds {HF_FILE} and other weights, which transformers ignores: remove {others}")


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the file name of each tensor in the Hugging Face index `path`. Raises ValueError if it is no index."""
    try:
        found = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        what = "it has no weight_map" if isinstance(error, (KeyError, TypeError)) else str(error)
        raise ValueError(f"{path} is not an index of weight files: {what}") from error
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{path} is not an index of weight files: its weight_map does not name a file for each tensor")
    return found


def _read_header(path: Path) -> dict[str, TensorRecord]:
    try:
        with safe_open(path, framework="pt"):
            pass  # checks the header, and that the file is as long as the header says
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
    return {
        name: TensorRecord(path, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


@dataclass(frozen=True)
class TensorHeader:
    """A tensor that a safetensors file will contain."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def encode_header(specs: Sequence[TensorHeader]) -> bytes:
    """Return a safetensors file's header; the tensors' bytes follow in the order of `specs`, without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


class SafetensorsWriter:
    """Writes one safetensors file in the order of `specs`, with one tensor in memory at a time."""

    def __init__(self, path: Path, specs: Sequence[TensorHeader]) -> None:
        self.path = path
        self._left = list(specs)
        self._file = path.open("wb")
        self._file.write(encode_header(specs))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor of `specs`. Raises ValueError for any other tensor."""
        spec = self._left.pop(0) if self._left else None
        if spec is None or (name, tuple(tensor.shape), tensor.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(f"{self.path}: expected {spec}, got {name} {tuple(tensor.shape)} {tensor.dtype}")
        bytes_B = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(bytes_B.numpy().data)

    def close(self) -> None:
        """Flush the file to the disk. Raises ValueError if tensors of `specs` are missing."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._left:
            raise ValueError(f"{self.path}: {len(self._left)} tensors were not written, first {self._left[0].name}")


def write_index(directory: Path, files: Iterable[tuple[str, Sequence[TensorHeader]]]) -> None:
    """Write `model.safetensors.index.json` for these files."""
    files = list(files)
    weight_map = {spec.name: file for file, specs in files for spec in specs}
    total = sum(spec.nbytes for _, specs in files for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / HF_INDEX).write_text(json.dumps(index, indent=2) + "\n")
