"""Rows of a Megatron checkpoint's tensors, read lazily from memory-mapped shards of torch.distributed.checkpoint.

Each stored chunk is a `torch.save` archive inside a `.distcp` file: an uncompressed zip whose entry `data/0` holds the
tensor's bytes. Only headers are parsed; the bytes are used in place.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from megarl.checkpoint.format.keys import StoredTensor, is_model_key, problems_of, resolve, stored_tensors
from megarl.checkpoint.format.shard_index import read_metadata
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry, Piece, cut
from megarl.models.hf.directory import HFTensors, MappedFile
from megarl.models.hf.gather import segments
from megarl.models.hf.model_files import SHARD_INDEX, megatron_step
from megarl.models.hf.read_config import load_info
from megarl.models.megatron.shards import table

# The class names under which torch.save stores untyped bytes together with their dtype.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor: its place (`offsets`, `sizes`), and the file and byte range of its archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class TensorMeta:
    """A key of the index: dtype, shape and chunks of its tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_index(step: Path) -> dict[str, TensorMeta]:
    """Return every tensor of a checkpoint by key, from `.metadata`. Raises ValueError like `read_metadata`."""
    metadata = read_metadata(step)
    return {
        key: TensorMeta(
            value.properties.dtype, tuple(value.size), tuple(_chunk(step, metadata, key, each) for each in value.chunks)
        )
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }


def check_keys(
    step: Path, index: Mapping[str, TensorMeta], wanted: Sequence[StoredTensor], info: ModelInfo
) -> dict[str, str]:
    """Check that the checkpoint holds exactly the model's keys and shapes, ignoring keys that are not weights.

    Returns the checkpoint's key for each key with another name (see `resolve`). Raises ValueError listing the
    differences.
    """
    found = {key: meta.shape for key, meta in index.items() if is_model_key(key)}
    renamed = resolve(found, wanted)
    found |= {key: found.pop(other) for key, other in renamed.items()}
    if problems := problems_of(found, wanted):
        raise ValueError(f"{step} does not match its config.json ({info.family}):\n" + "\n".join(problems))
    return renamed


class MegatronDirectory:
    """A Megatron checkpoint, read by Hugging Face tensor (`HFTensors`) or by key.

    `info`: the model that it must hold; None: that of its config.json. Raises ValueError naming what is missing,
    unexpected, misshapen or truncated.
    """

    def __init__(self, path: Path | str, info: ModelInfo | None = None) -> None:
        step = megatron_step(path)
        if step is None:
            raise ValueError(f"{path} is not a Megatron checkpoint: it has neither a tracker file nor shards")
        self.path, self.step = Path(path), step
        self.info = info or load_info(step)
        self.entries = table(self.info)
        self.index = read_index(step)
        stored = stored_tensors(self.entries)
        wanted = [each for parts in stored.values() for each in parts]
        for key, other in check_keys(step, self.index, wanted, self.info).items():
            self.index[key] = self.index.pop(other)
        self._sources = {
            name: (entry, source, stored[entry.megatron])
            for entry in self.entries.values()
            for source, name in enumerate(entry.names)
        }
        self._maps: dict[str, MappedFile] = {}
        self._archives: dict[Chunk, _Archive] = {}
        self._check_files()

    def names(self) -> list[str]:
        """Return the Hugging Face names, in table order."""
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the tensor's shape in the family's table."""
        entry, source, _ = self._sources[name]
        return entry.shapes[source]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the stored tensor that contains this one."""
        return self.index[self.stored(name).key].dtype

    def stored(self, name: str) -> StoredTensor:
        """Return the stored tensor that contains a Hugging Face tensor, or the first rows of it."""
        entry, source, parts = self._sources[name]
        if len(parts) == 1:
            return parts[0]
        place, _, _ = min(segments(entry, source, 0, 1), key=lambda each: each[1])
        return next(part for part in reversed(parts) if part.start <= place)

    def rows(self, name: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Return rows [start, stop) along axis 0, and only `columns` of axis 1; a view if contiguous in a file."""
        entry, source, stored = self._sources[name]
        if entry.rule.axis == 1:
            if len(entry.names) > 1:
                raise ValueError(f"{entry.megatron}: several tensors joined along axis 1 are not supported")
            return self.stored_rows(stored[0].key, start, stop, columns)
        parts = []
        for offset, first, last in sorted(segments(entry, source, 0, 1), key=lambda each: each[1]):
            for each in stored:
                moved = offset - first - each.start  # from a row of the tensor to that of the section
                low, high = max(start, first, -moved), min(stop, last, each.shape[0] - moved)
                if low < high:
                    parts.append(self.stored_rows(each.key, low + moved, high + moved, columns))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def stored_rows(self, key: str, start: int, stop: int, columns: tuple[int, int] | None = None) -> torch.Tensor:
        """Return rows [start, stop) of a key's tensor, and only `columns` of axis 1; a view if one chunk holds them.

        Raises ValueError unless the chunks hold them exactly once.
        """
        meta = self.index[key]
        box = [(start, stop), *((0, size) for size in meta.shape[1:])]
        if columns is not None:
            box[1] = columns
        found: list[tuple[tuple[slice, ...], torch.Tensor]] = []  # a part's place in the result, and the part
        for chunk in meta.chunks:
            held = [
                (max(low, at), min(high, at + size))
                for (low, high), at, size in zip(box, chunk.offsets, chunk.sizes, strict=True)
            ]
            if all(low < high for low, high in held):
                first, *inner = ((low - at, high - at) for (low, high), at in zip(held, chunk.offsets, strict=True))
                part = self._chunk_rows(key, meta, chunk, *first)[(slice(None), *(slice(*each) for each in inner))]
                place = tuple(slice(low - at, high - at) for (low, high), (at, _) in zip(held, box, strict=True))
                found.append((place, part))
        shape = [high - low for low, high in box]
        if sum(part.numel() for _, part in found) != math.prod(shape):
            raise ValueError(f"{self.step / SHARD_INDEX}: the parts of {key} do not make up its rows {start} to {stop}")
        if len(found) == 1:
            return found[0][1]
        out = torch.empty(shape, dtype=meta.dtype)
        for place, part in found:
            out[place] = part
        return out

    def will_need(self, name: str, start: int, stop: int) -> None:
        """Ask the kernel to read the chunks of these rows ahead, if the tensor is stored by itself."""
        stored = self.stored(name)
        if stored.shape == self.shape(name):
            for chunk in self.index[stored.key].chunks:
                if chunk.offsets[0] < stop and chunk.offsets[0] + chunk.sizes[0] > start:
                    self._file(chunk.file).will_need(chunk.begin, chunk.begin + chunk.length)

    def files(self) -> list[Path]:
        """Return the shards that hold weights, and the index."""
        used = {c.file for key, meta in self.index.items() if is_model_key(key) for c in meta.chunks}
        return [self.step / SHARD_INDEX, *(self.step / file for file in sorted(used))]

    def _chunk_rows(self, key: str, meta: TensorMeta, chunk: Chunk, start: int, stop: int) -> torch.Tensor:
        file = self._file(chunk.file)
        archive = self._archives.get(chunk) or _open_archive(file, chunk, key)
        self._archives[chunk] = archive
        if (archive.dtype, archive.shape) != (meta.dtype, chunk.sizes):
            raise ValueError(
                f"{file.path}: {key} is {list(archive.shape)} {archive.dtype}, but the index says "
                f"{list(chunk.sizes)} {meta.dtype}"
            )
        if archive.contiguous:
            step = meta.dtype.itemsize * torch.Size(chunk.sizes[1:]).numel()
            return file.tensor(meta.dtype, (stop - start, *chunk.sizes[1:]), archive.data + start * step)
        return archive.tensor(file)[start:stop]

    def _file(self, name: str) -> MappedFile:
        if name not in self._maps:
            self._maps[name] = MappedFile(self.step / name)
        return self._maps[name]

    def _check_files(self) -> None:
        ends: dict[str, tuple[int, str]] = defaultdict(lambda: (0, ""))
        for key, meta in self.index.items():
            if is_model_key(key):
                for chunk in meta.chunks:
                    ends[chunk.file] = max(ends[chunk.file], (chunk.begin + chunk.length, key))
        for file, (end, key) in ends.items():
            path = self.step / file
            if not path.is_file():
                raise ValueError(f"{path} does not exist, but the index says it holds {key}")
            if path.stat().st_size < end:
                raise ValueError(f"{path} is truncated: {path.stat().st_size} bytes, {key} ends at {end}")


def _chunk(step: Path, metadata: Metadata, key: str, chunk: ChunkStorageMetadata) -> Chunk:
    info = metadata.storage_data.get(MetadataIndex(key, chunk.offsets))
    if info is None:
        raise ValueError(f"{step / SHARD_INDEX} does not say where {key} at {list(chunk.offsets)} is stored")
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes), info.relative_path, info.offset, info.length)


def source_pieces(stored: StoredTensor, start: int, stop: int) -> list[Piece]:
    """Return the Hugging Face rows that make up rows [start, stop) of a stored tensor."""
    return cut(stored.entry.pieces(0, 1), stored.start + start, stored.start + stop)


def copy_pieces(target: torch.Tensor, entry: Entry, pieces: Iterable[Piece], source: HFTensors) -> int:
    """Fill a tensor with pieces of Hugging Face tensors, and zeros for padding; return the bytes read."""
    axis, offset, size = entry.rule.axis or 0, 0, 0
    for piece in pieces:
        part = target.narrow(axis, offset, piece.size)
        if piece.source is None:
            part.zero_()
        else:
            name, held = entry.names[piece.source], (piece.start, piece.stop)
            values = source.rows(name, 0, source.shape(name)[0], held) if axis else source.rows(name, *held)
            part.copy_(values)
            size += values.nbytes
        offset += piece.size
    return size


@dataclass(frozen=True)
class _Archive:
    """A tensor in a `torch.save` archive."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    data: int  # the tensor's first byte in the file

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def tensor(self, file: MappedFile) -> torch.Tensor:
        """Return the whole tensor, a view of the mapped file."""
        if self.contiguous:
            return file.tensor(self.dtype, self.shape, self.data)
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return file.tensor(self.dtype, (span,), self.data).as_strided(self.shape, self.stride)


def archived_tensor(file: MappedFile, chunk: Chunk, key: str) -> torch.Tensor:
    """Return the tensor of a `torch.save` archive, a view of the mapped file.

    Raises ValueError naming `key` if the archive is damaged.
    """
    return _open_archive(file, chunk, key).tensor(file)


def _open_archive(file: MappedFile, chunk: Chunk, key: str) -> _Archive:
    try:
        return _parse_archive(file, chunk)
    except Exception as error:  # the error that pickle raises depends on the damage
        raise ValueError(f"{file.path}: the archive of {key} at byte {chunk.begin} is damaged: {error}") from error


def _parse_archive(file: MappedFile, chunk: Chunk) -> _Archive:
    """Find the tensor's bytes through the zip's directory; `data.pkl` has dtype, shape and stride."""
    entries = list(_entries(file, chunk))
    pickled = next((file.bytes(at, at + size) for name, at, size in entries if name.endswith("/data.pkl")), None)
    stored = next((at for name, at, _ in entries if name.endswith("/data/0")), None)
    if pickled is None:
        raise ValueError("it holds no tensor")
    dtype, offset, shape, stride = _TensorUnpickler(io.BytesIO(pickled)).load()
    if not isinstance(dtype, torch.dtype) or not all(type(n) is int and n >= 0 for n in (offset, *shape, *stride)):
        raise ValueError("it does not describe a plain tensor")
    if stored is None and torch.Size(shape).numel():
        raise ValueError("it holds no data")
    return _Archive(dtype, shape, stride, (stored or 0) + offset * dtype.itemsize)


class _ChunkFile:
    """The bytes of a chunk as a file for `zipfile`."""

    def __init__(self, file: MappedFile, chunk: Chunk) -> None:
        self._file, self._chunk, self._at = file, chunk, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._chunk.length}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._chunk.length if size < 0 else min(self._at + size, self._chunk.length)
        content = self._file.bytes(self._chunk.begin + self._at, self._chunk.begin + end)
        self._at += len(content)
        return content


def _entries(file: MappedFile, chunk: Chunk) -> Iterator[tuple[str, int, int]]:
    """Yield name, first byte in the file and size of each entry. Raises ValueError if one is compressed."""
    with zipfile.ZipFile(cast("IO[bytes]", _ChunkFile(file, chunk))) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("not an uncompressed archive of torch.save")
            local = chunk.begin + entry.header_offset  # of its header: 30 bytes, name, extra fields
            name_size, extra_size = struct.unpack("<2H", file.bytes(local + 26, local + 30))
            yield entry.filename, local + 30 + name_size + extra_size, entry.file_size


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles a tensor's `data.pkl` as (dtype, storage offset, shape, stride); builds and calls nothing else."""

    def find_class(self, module: str, name: str) -> object:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return _rebuild if name == "_rebuild_tensor_v2" else lambda data, *_: data
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise pickle.UnpicklingError(f"{module}.{name} is not part of a plain tensor")

    def persistent_load(self, pid: tuple[str, torch.dtype, str, str, int]) -> torch.dtype:
        """Return the dtype of a storage, given as ("storage", dtype, key, device, number of elements)."""
        return pid[1]


def _rebuild(
    dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int], *_: object
) -> tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]]:
    """Replace `torch._utils._rebuild_tensor_v2`: return the arguments that describe the tensor."""
    return dtype, offset, tuple(shape), tuple(stride)
