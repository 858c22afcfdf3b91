"""Rows of Hugging Face tensors as views of memory-mapped files: nothing is copied, or read before it is used."""

from __future__ import annotations

import mmap
import os
import struct
import warnings
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch

from megarl.checkpoint.format.shard_index import load_plain
from megarl.common.files import inside
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry
from megarl.models.hf.load import check_tensors, is_left_out
from megarl.models.hf.read_config import load_info
from megarl.models.hf.safetensors import DTYPE_NAMES, DTYPES, SafetensorsDirectory, TensorRecord, read_weight_map
from megarl.models.megatron.shards import table

READAHEAD_BYTES = 2**21
_BIN_INDEX = "pytorch_model.bin.index.json"


class MappedFile:
    """A memory-mapped file, whose bytes become tensors that share its pages. Never write to them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def __len__(self) -> int:
        return len(self._map)

    def bytes(self, start: int, stop: int) -> bytes:
        """Return a copy of bytes [start, stop), fewer where the file ends before."""
        return self._map[start:stop]

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> torch.Tensor:
        """Return the contiguous tensor that begins at byte `offset`. Raises ValueError if it ends beyond the file."""
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

        The requests are small, because of each one Linux reads no more than the device's readahead.
        """
        stop = min(stop, len(self))
        for position in range(start - start % mmap.PAGESIZE, stop, READAHEAD_BYTES):
            self._map.madvise(mmap.MADV_WILLNEED, position, min(READAHEAD_BYTES, stop - position))


class HFTensors(Protocol):
    """A model's Hugging Face tensors, read from files of either format."""

    path: Path
    info: ModelInfo
    entries: dict[str, Entry]

    def names(self) -> list[str]:
        """Return the Hugging Face names in the order of the family's table."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's Hugging Face shape. Raises KeyError for an unknown name."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the files have the tensor."""

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of a tensor along axis 0, in the files' dtype. Do not write to them."""
        ...


class HFDirectory:
    """A Hugging Face directory with safetensors or, if `allow_pickle`, `pytorch_model*.bin` (read with `weights_only`).

    `left_out`: its tensors that belong to untrained parts. They are not part of the model, but are reported to users.

    Raises ValueError naming file and tensor for everything that does not match config.json: a truncated file; a
    missing, unexpected or misshapen tensor; an index that contradicts the files.
    """

    def __init__(self, path: Path | str, *, allow_pickle: bool = False) -> None:
        self.path = Path(path)
        self.info = load_info(self.path)
        self.entries = table(self.info)
        pickled = allow_pickle and not any(self.path.glob("*.safetensors"))
        self._files: SafetensorsDirectory | _PickledDirectory = (
            _PickledDirectory(self.path) if pickled else _safetensors(self.path)
        )
        check_tensors(self._files, self.entries, self.info)
        self.left_out = [name for name in self._files.records if is_left_out(name, self.info)]
        self._maps: dict[Path, tuple[MappedFile, int]] = {}
        if self.info.tied and "lm_head.weight" in self._files.records:
            self._check_redundant_head()

    def names(self) -> list[str]:
        """Return the tensors' names in the order of the family's table, without the redundant tensors of old files."""
        return [name for entry in self.entries.values() for name in entry.names]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the file has; it equals that of the family's table."""
        return self._files.records[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the file has the tensor."""
        return DTYPES[self._files.records[name].dtype]

    def file(self, name: str) -> Path:
        """Return the weight file that holds the tensor."""
        return self._files.records[name].file

    def files(self) -> list[Path]:
        """Return the weight files, for `fingerprint`."""
        return sorted({record.file for record in self._files.records.values()})

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) along axis 0, a view of the file. Raises ValueError if the file is truncated."""
        if isinstance(self._files, _PickledDirectory):
            return self._files.tensors[name][start:stop]
        file, dtype, shape, offset = self._place(name)
        step = dtype.itemsize * torch.Size(shape[1:]).numel()
        return file.tensor(dtype, (stop - start, *shape[1:]), offset + start * step)

    def will_need(self, name: str, start: int, stop: int) -> None:
        """Ask the kernel to read these rows ahead."""
        if isinstance(self._files, SafetensorsDirectory):
            file, dtype, shape, offset = self._place(name)
            step = dtype.itemsize * torch.Size(shape[1:]).numel()
            file.will_need(offset + start * step, offset + stop * step)

    def _place(self, name: str) -> tuple[MappedFile, torch.dtype, tuple[int, ...], int]:
        record = self._files.records[name]
        if record.file not in self._maps:
            mapped = MappedFile(record.file)
            (length,) = struct.unpack("<Q", mapped.bytes(0, 8))
            self._maps[record.file] = (mapped, 8 + length)
        mapped, start = self._maps[record.file]
        return mapped, DTYPES[record.dtype], record.shape, start + record.begin

    def _check_redundant_head(self) -> None:
        name = "model.embed_tokens.weight"
        stop = self.shape(name)[0]
        if not torch.equal(self.rows(name, 0, stop), self.rows("lm_head.weight", 0, stop)):
            raise ValueError(
                f"{self.path}: the embeddings are tied, but lm_head.weight differs from {name}; "
                "set tie_word_embeddings to false or remove lm_head.weight"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._maps.clear()


def _safetensors(path: Path) -> SafetensorsDirectory:
    if any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
        raise ValueError(
            f"{path} holds only pickled weights (*.bin), which can run code when they are loaded; add --allow-pickle "
            "to read them with weights_only, or save the model again with safe_serialization=True"
        )
    return SafetensorsDirectory(path)


class _PickledDirectory:
    """The tensors of `pytorch_model.bin` or its sharded form, memory-mapped; nothing but tensors is unpickled."""

    def __init__(self, path: Path) -> None:
        self.directory = path
        self.tensors: dict[str, torch.Tensor] = {}
        self.records: dict[str, TensorRecord] = {}
        index = path / _BIN_INDEX
        names = (
            sorted(set(read_weight_map(index).values()))
            if index.is_file()
            else sorted(file.name for file in path.glob("pytorch_model*.bin"))
        )
        if not names:
            raise ValueError(f"{path} has neither *.safetensors nor pytorch_model*.bin")
        for name in names:
            self._read(inside(path, name))

    def _read(self, file: Path) -> None:
        try:
            content = load_plain(file, mmap=True)
        except ValueError as error:
            raise ValueError(f"{file} cannot be read as plain tensors: {error}") from error
        if not isinstance(content, dict) or not all(isinstance(each, torch.Tensor) for each in content.values()):
            raise ValueError(f"{file} cannot be read as plain tensors: it must be a dict of tensors by name")
        for name, tensor in content.items():
            if name in self.tensors:
                raise ValueError(f"tensor {name} is in both {self.records[name].file} and {file}")
            self.tensors[name] = tensor.contiguous()
            dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            self.records[name] = TensorRecord(file, dtype, tuple(tensor.shape), 0, tensor.nbytes)


def fingerprint(files: list[Path]) -> list[tuple[str, int, int]]:
    """Return name, size in bytes and modification time in ns of each file.

    A resumed conversion compares them to detect that its source has changed.
    """
    return [(file.name, status.st_size, status.st_mtime_ns) for file in files if (status := os.stat(file))]
