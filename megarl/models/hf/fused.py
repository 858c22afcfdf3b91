"""Files that store all experts of a layer in one tensor, [experts, in, out], seen as a matrix [out, in] per expert.

The family's table has matrices, as Megatron-Core does. `out` may join several of them, such as gate and up projection.
Tensors of shape [experts, out, in] are read but never written.

Shapes: E experts, I and O inputs and outputs of a fused tensor's experts.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry
from megarl.models.families import FAMILIES
from megarl.models.hf.safetensors import TensorHeader, TensorRecord, encode_header


@dataclass(frozen=True)
class FusedTensor:
    """A tensor of the files, [E, I, O], or [E, O, I] if `by_rows`. `parts`: per expert, the matrices that make up O."""

    name: str
    shape: tuple[int, int, int]
    parts: tuple[tuple[str, ...], ...]
    by_rows: bool = False

    def matrices(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield each matrix's name, expert, and range [start, stop) of O."""
        width = self.shape[1 if self.by_rows else 2] // len(self.parts[0])
        for expert, names in enumerate(self.parts):
            yield from ((name, expert, i * width, (i + 1) * width) for i, name in enumerate(names))


def fused_tensors(info: ModelInfo, entries: Mapping[str, Entry], *, reads: bool = False) -> dict[str, FusedTensor]:
    """Return the fused tensors of a model's files by name; {} for families without.

    `reads`: include those that are read but not exported.
    """
    shapes = {name: shape for entry in entries.values() for name, shape in zip(entry.names, entry.shapes, strict=True)}
    found = {}
    family = FAMILIES[info.family]
    for template, parts in (*family.fused, *(family.fused_rows if reads else ())):
        for layer in filter(info.is_moe_layer, range(info.num_layers)):
            experts = tuple(
                tuple(part.format(layer=layer, expert=expert) for part in parts)
                for expert in range(info.num_experts or 0)
            )
            rows, columns = shapes[experts[0][0]]
            name = template.format(layer=layer)
            by_rows, outputs = (template, parts) in family.fused_rows, rows * len(parts)
            sizes = (outputs, columns) if by_rows else (columns, outputs)
            found[name] = FusedTensor(name, (len(experts), *sizes), experts, by_rows)
    return found


@dataclass(frozen=True)
class Matrix:
    """A matrix's place in the files: range [start, stop) of O of one expert of the fused tensor `record`."""

    record: TensorRecord
    expert: int
    start: int
    stop: int
    by_rows: bool


def split_records(
    records: dict[str, TensorRecord], fused: Mapping[str, FusedTensor]
) -> tuple[dict[str, TensorRecord], dict[str, Matrix]]:
    """Return the files' tensors with matrices in place of fused tensors, and the matrices' places.

    Raises ValueError if a fused tensor's shape differs from the table's.
    """
    split: dict[str, TensorRecord] = {}
    matrices: dict[str, Matrix] = {}
    for name, record in records.items():
        if name not in fused:
            split[name] = record
            continue
        if record.shape != fused[name].shape:
            raise ValueError(
                f"{name} in {record.file}: shape {list(record.shape)}, config.json implies {list(fused[name].shape)} "
                f"(experts, {'out, in' if fused[name].by_rows else 'in, out'})"
            )
        for each, expert, start, stop in fused[name].matrices():
            shape = (stop - start, record.shape[2 if fused[name].by_rows else 1])
            split[each] = TensorRecord(record.file, record.dtype, shape, record.begin, record.end)
            matrices[each] = Matrix(record, expert, start, stop, fused[name].by_rows)
    return split, matrices


def joined(names: Sequence[str], fused: Mapping[str, FusedTensor]) -> list[str]:
    """Return the names in the files, in order: a fused tensor takes the place of its first matrix."""
    owner = {part: name for name, each in fused.items() for parts in each.parts for part in parts}
    return list(dict.fromkeys(owner.get(name, name) for name in names))


class FusedWriter:
    """Writes a rank's matrices into fused tensors of files that it shares with other ranks.

    `files`: the tensors of each file by its name, all of them fused.
    """

    def __init__(
        self, directory: Path, files: Mapping[str, Sequence[TensorHeader]], fused: Mapping[str, FusedTensor]
    ) -> None:
        self._directory, self._files = directory, files
        self._places: dict[str, tuple[str, int, TensorHeader]] = {}  # of a fused tensor: file, first byte, header
        for file, tensors in files.items():
            offset = len(encode_header(tensors))
            for each in tensors:
                self._places[each.name] = (file, offset, each)
                offset += each.nbytes
        self._matrices: dict[str, tuple[FusedTensor, int, int, int]] = {
            name: (each, expert, start, stop)
            for each in fused.values()
            for name, expert, start, stop in each.matrices()
        }
        self._slabs: dict[tuple[str, int], torch.Tensor] = {}  # [I, O] of experts that lack matrices yet
        self._open: dict[str, BinaryIO] = {}

    def create(self) -> None:
        """Create every file at full size, with its header. One rank calls it before any rank writes."""
        for file, tensors in self._files.items():
            header = encode_header(tensors)
            with (self._directory / file).open("wb") as out:
                out.write(header)
                out.truncate(len(header) + sum(each.nbytes for each in tensors))

    def takes(self, name: str) -> bool:
        """Return whether the tensor is a matrix of a fused tensor."""
        return name in self._matrices

    def write(self, name: str, matrix: torch.Tensor) -> None:
        """Add a matrix [out, in]. An expert is written once all its matrices are added."""
        tensor, expert, start, stop = self._matrices[name]
        file, offset, header = self._places[tensor.name]
        slab_IO = self._slabs.setdefault((tensor.name, expert), torch.empty(tensor.shape[1:], dtype=header.dtype))
        slab_IO[:, start:stop] = matrix.T
        if name != tensor.parts[expert][-1]:
            return
        del self._slabs[tensor.name, expert]
        if file not in self._open:
            self._open[file] = (self._directory / file).open("r+b")
        self._open[file].seek(offset + expert * slab_IO.nbytes)
        self._open[file].write(slab_IO.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush the files to the disk. Raises ValueError if an expert lacks a matrix."""
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self._slabs:
            raise ValueError(f"{self._directory}: experts without all of their matrices: {list(self._slabs)[:5]}")


def fuse(matrices: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return [E, I, O], fused from the matrices [out, in] of each expert."""
    return torch.stack([torch.cat([each.T for each in parts], 1) for parts in matrices])
