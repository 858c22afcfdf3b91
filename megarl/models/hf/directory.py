"""Rows of Hugging Face tensors as views of memory-mapped files: nothing is copied, nor read before it is used.

The files must hold exactly the tensors of the family's table, with its shapes; the error lists all differences.
"""

import mmap
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry
from megarl.models.families import FAMILIES
from megarl.models.hf.fused import fused_tensors, split_records
from megarl.models.hf.model_files import raw_config
from megarl.models.hf.quantized import dequantized, quantized_matrices
from megarl.models.hf.read_config import load_info, read_quantization
from megarl.models.hf.safetensors import DTYPES, TensorRecord, read_records
from megarl.models.megatron.shards import EMBEDDING, table

READAHEAD_BYTES = 2**21
LISTED = 20  # most names listed in an error message


class MappedFile:
    """A memory-mapped file. Its tensors share the file's pages: never write to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        return len(self._map)

    def bytes(self, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop), or fewer if the file ends earlier."""
        return self._map[start:stop]

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return the contiguous tensor at byte `offset`. Raises ValueError if it extends beyond the file."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        if offset + count * dtype.itemsize > len(self):
            raise ValueError(f"{self.path} is truncated: {len(self)} bytes, but a tensor ends beyond that")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def will_need(self, start: int, stop: int) -> None:
        """Ask the kernel to read bytes [start, stop) ahead.

        The requests are small: Linux reads no more of each than the device's readahead.
        """
        stop = min(stop, len(self))
        for position in range(start - start % mmap.PAGESIZE, stop, READAHEAD_BYTES):
            self._map.madvise(mmap.MADV_WILLNEED, position, min(READAHEAD_BYTES, stop - position))


class HFTensors(Protocol):
    """A model's Hugging Face tensors, read from a Hugging Face directory or a Megatron checkpoint."""

    path: Path
    info: ModelInfo
    entries: dict[str, Entry]

    def names(self) -> list[str]:
        """Return the Hugging Face names, in table order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's Hugging Face shape. Raises KeyError for an unknown name."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype in the files."""

    def rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Return rows [start, stop) along axis 0, and only `columns` of axis 1, in the files' dtype. Read-only."""
        ...


class HFDirectory:
    """A Hugging Face directory with safetensors. Quantised matrices (`quantization`) are dequantised on reading.

    `info`: the model that the files must hold; None: that of config.json. `left_out`: tensors of untrained parts, which
    are reported to users but are not part of the model.

    Raises ValueError naming file and tensor for every mismatch: a truncated file; a missing, unexpected or misshapen
    tensor; an index that contradicts the files.
    """

    def __init__(self, path: Path | str, info: ModelInfo | None = None) -> None:
        self.path = Path(path)
        self.info = info or load_info(self.path)
        self.entries = table(self.info)
        records = _by_table_names(read_records(self.path), self.info)
        self._files = sorted({record.file for record in records.values()})
        self.quantization = read_quantization(raw_config(self.path))
        records, self._quantized = quantized_matrices(records, self.quantization)
        self.records, self._matrices = split_records(records, fused_tensors(self.info, self.entries, reads=True))
        check_tensors(self.path, self.records, self.entries, self.info)
        self.left_out = [name for name in self.records if is_left_out(name, self.info)]
        self._maps: dict[Path, tuple[MappedFile, int]] = {}
        if self.info.tied and "lm_head.weight" in self.records:
            self._check_redundant_head()

    def names(self) -> list[str]:
        """Return the tensors' names in table order, without the redundant tensors of old files."""
        return [name for entry in self.entries.values() for name in entry.names]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in the file, which equals the table's."""
        return self.records[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype in the file."""
        return DTYPES[self.records[name].dtype]

    def file(self, name: str) -> Path:
        """Return the weight file that holds the tensor."""
        return self.records[name].file

    def files(self) -> list[Path]:
        """Return the weight files, for `fingerprint`."""
        return self._files

    def rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Return rows [start, stop) along axis 0, and only `columns` of axis 1, as a view of the file.

        Rows of fused and quantised matrices are copies. Raises ValueError if the file is truncated.
        """
        if name in self._matrices:
            return self._matrix(name)[start:stop, slice(*columns or (None, None))].contiguous()
        if name in self._quantized:
            return dequantized(self._quantized[name], self._read, start, stop, columns)
        rows = self._read(self.records[name], self.dtype(name), start, stop)
        return rows if columns is None else rows[:, slice(*columns)]

    def will_need(self, name: str, start: int, stop: int) -> None:
        """Ask the kernel to read these rows ahead; no effect on matrices of a fused tensor."""
        if name in self._matrices:
            return
        record = self._quantized[name].values if name in self._quantized else self.records[name]
        file, offset = self._place(record)
        step = (record.end - record.begin) // max(record.shape[0], 1)
        file.will_need(offset + start * step, offset + stop * step)

    def _read(self, record: TensorRecord, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        file, offset = self._place(record)
        step = dtype.itemsize * torch.Size(record.shape[1:]).numel()
        return file.tensor(dtype, (stop - start, *record.shape[1:]), offset + start * step)

    def _matrix(self, name: str) -> torch.Tensor:
        """Return a matrix [out, in] of a fused tensor, a view of the file."""
        dtype, place = self.dtype(name), self._matrices[name]
        file, offset = self._place(self.records[name])
        _, rows, columns = place.record.shape
        whole = file.tensor(dtype, (rows, columns), offset + place.expert * rows * columns * dtype.itemsize)
        return whole[place.start : place.stop] if place.by_rows else whole[:, place.start : place.stop].T

    def _place(self, record: TensorRecord) -> tuple[MappedFile, int]:
        if record.file not in self._maps:
            mapped = MappedFile(record.file)
            (length,) = struct.unpack("<Q", mapped.bytes(0, 8))
            self._maps[record.file] = (mapped, 8 + length)
        mapped, start = self._maps[record.file]
        return mapped, start + record.begin

    def _check_redundant_head(self) -> None:
        (name,) = self.entries[EMBEDDING].names
        stop = self.shape(name)[0]
        if not torch.equal(self.rows(name, 0, stop), self.rows("lm_head.weight", 0, stop)):
            raise ValueError(
                f"{self.path}: the embeddings are tied, but lm_head.weight differs from {name}; "
                "set tie_word_embeddings to false or remove lm_head.weight"
            )


def _by_table_names(records: dict[str, TensorRecord], info: ModelInfo) -> dict[str, TensorRecord]:
    """Return the files' tensors by table name. Raises ValueError for a tensor that is there twice."""
    renamed: dict[str, TensorRecord] = {}
    for name, record in records.items():
        pairs = FAMILIES[info.family].aliases
        own = next((ours + name.removeprefix(theirs) for theirs, ours in pairs if name.startswith(theirs)), name)
        if own in renamed:
            raise ValueError(f"tensor {own} is in {renamed[own].file} and, under another name, in {record.file}")
        renamed[own] = record
    return renamed


def check_tensors(
    directory: Path, records: Mapping[str, TensorRecord], entries: dict[str, Entry], info: ModelInfo
) -> None:
    """Check that the files hold exactly the table's tensors, in floating point.

    Raises ValueError listing the missing, unexpected and misshapen tensors.
    """
    expected = {
        name: shape for entry in entries.values() for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    tolerated = _redundant_names(info) | {name for name in records if is_left_out(name, info)}
    missing = [name for name in expected if name not in records]
    extra = sorted(name for name in records if name not in expected and name not in tolerated)
    wrong = []
    for name, shape in expected.items():
        record = records.get(name)
        if record is None:
            continue
        dtype = DTYPES.get(record.dtype)
        if record.shape != shape:
            wrong.append(f"{name} in {record.file}: shape {list(record.shape)}, config.json implies {list(shape)}")
        elif dtype is None or not dtype.is_floating_point:
            wrong.append(f"{name} in {record.file}: dtype {record.dtype} is not a supported floating-point type")
    problems = [
        *listed("missing tensors", missing),
        *listed("tensors that the family does not have", extra),
        *listed("misshapen tensors", wrong),
    ]
    if problems:
        raise ValueError(f"{directory} does not match its config.json ({info.family}):\n" + "\n".join(problems))


def is_left_out(name: str, info: ModelInfo) -> bool:
    """Return whether a Hugging Face tensor belongs to a part that is neither trained nor exported."""
    return name.startswith(FAMILIES[info.family].left_out(info))


def left_out_note(names: Sequence[str], info: ModelInfo) -> str:
    """Return one line that reports the left-out tensors `names`, or "" if there are none."""
    if not names:
        return ""
    parts = [prefix for prefix in FAMILIES[info.family].left_out(info) if any(n.startswith(prefix) for n in names)]
    many = len(parts) > 1
    predicts = all(part.startswith("model.layers.") for part in parts)
    what = f"the multi-token prediction layer{'s' * many} " if predicts else ""
    return (
        f"left out: {len(names)} tensors of {what}{', '.join(f'{part}*' for part in parts)}, "
        f"which {'are' if many else 'is'} not trained"
    )


def _redundant_names(info: ModelInfo) -> set[str]:
    names = {
        template.format(layer=layer) for template in FAMILIES[info.family].redundant for layer in range(info.num_layers)
    }
    return names | ({"lm_head.weight"} if info.tied else set())


def listed(title: str, names: list[str]) -> list[str]:
    """Return lines of an error message: the number of `names` with `title`, and the first names; [] without names."""
    if not names:
        return []
    more = [f"    … and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return [f"  {len(names)} {title}:", *(f"    {name}" for name in names[:LISTED]), *more]


def fingerprint(files: list[Path]) -> list[tuple[str, int, int]]:
    """Return name, size in bytes and modification time in ns of each file, to detect a changed source on resume."""
    return [(file.name, status.st_size, status.st_mtime_ns) for file in files if (status := os.stat(file))]
