"""Converts Megatron to Hugging Face: writes what `HFExporter` would export, directly from the shards."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from megarl.checkpoint.convert.target import writing
from megarl.checkpoint.convert.workers import Item, ReportBytes, pack, split, unit_bytes
from megarl.checkpoint.format.manifest import fsync
from megarl.checkpoint.format.megatron_files import MegatronDirectory
from megarl.models.hf.directory import fingerprint
from megarl.models.hf.export import ExportedTensor, copy_side_files, plan_files
from megarl.models.hf.fused import fuse, fused_tensors, joined
from megarl.models.hf.model_files import HF_FILES, HF_SHARD_BYTES
from megarl.models.hf.safetensors import HF_INDEX, encode_header, write_index

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class MegatronToHF:
    """The conversion of one step directory; `dtype=None` keeps dtypes. Buffers always keep theirs."""

    kind = "export"

    def __init__(self, source: MegatronDirectory, dtype: torch.dtype | None, shard_bytes: int = HF_SHARD_BYTES) -> None:
        self.source = source
        self.dtype = dtype

        self._fused = fused_tensors(source.info, source.entries)

        def target(name: str) -> ExportedTensor:
            first = self._fused[name].parts[0][0] if name in self._fused else name
            keeps = dtype is None or source.stored(first).entry.rule.stays_fp32
            shape = self._fused[name].shape if name in self._fused else source.shape(name)
            return ExportedTensor(name, shape, source.dtype(first) if keeps or dtype is None else dtype, 0)

        specs = [target(name) for name in joined(source.names(), self._fused)]
        self.files = plan_files(specs, shard_bytes)
        self._headers = {name: encode_header(tensors) for name, tensors in self.files}
        self._places: dict[str, tuple[str, int, ExportedTensor]] = {}
        for name, tensors in self.files:
            offset = len(self._headers[name])
            for spec in tensors:
                self._places[spec.name] = (name, offset, spec)
                offset += spec.nbytes
        total = sum(spec.nbytes for spec in specs)
        self.units = pack(
            (item for spec in specs for item in split(spec.name, spec.shape, spec.dtype)),
            unit_bytes(total),
            apart=lambda item: self._places[item.what][0],
        )
        self.sizes = [sum(item.nbytes for item in unit) for unit in self.units]
        self.tensors = len(specs)

    def plan(self) -> dict[str, object]:
        """Return, as JSON, what a resumed conversion must have in common with the interrupted one."""
        return {
            "kind": self.kind,
            "source": str(self.source.step.absolute()),
            "files": fingerprint([*self.source.files(), self.source.step / HF_FILES / "config.json"]),
            "dtype": str(self.dtype),
            "units": len(self.units),
            # Digests of the headers: another --shard-gb may give as many files with other tensors.
            "outputs": {name: blake3(self._headers[name]).hexdigest() for name, _ in self.files},
        }

    def prepare(self, partial: Path) -> None:
        """Create every file at full size with its header; the tensors' bytes are holes."""
        for name, tensors in self.files:
            size = len(self._headers[name]) + sum(spec.nbytes for spec in tensors)
            with writing(partial / name):
                with (partial / name).open("ab") as file:
                    file.truncate(size)
                descriptor = os.open(partial / name, os.O_WRONLY)
                try:
                    _write_at(descriptor, self._headers[name], 0)
                finally:
                    os.close(descriptor)

    def write_unit(self, partial: Path, number: int, report: ReportBytes) -> None:
        """Write neighbouring tensors, or rows of one, into their places, and sync them to the disk."""
        unit = self.units[number]
        for item in unit:
            if item.what not in self._fused:
                self.source.will_need(item.what, item.start, item.stop)
        path, at = partial / self._places[unit[0].what][0], unit[0]
        with writing(path, lambda: at.what):
            descriptor = os.open(path, os.O_WRONLY)
            try:
                for at in unit:
                    self._write(descriptor, at)
                    report(at.nbytes)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)

    def finish(self, partial: Path, results: dict[int, None]) -> None:
        """Check the files' sizes; write config, tokenizer and index."""
        for name, tensors in self.files:
            _check(partial / name, self._headers[name], tensors)
        first = self.files[0][1][0].dtype
        with writing(partial):
            copy_side_files(self.source.step / HF_FILES, partial, self.dtype or first)
        if len(self.files) > 1:
            with writing(partial / HF_INDEX):
                write_index(partial, self.files)
        for path in partial.rglob("*"):
            fsync(path)

    def summary(self) -> str:
        """Return the number of tensors and files as text."""
        return f"{self.tensors} tensors in {len(self.files)} files"

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._fused:
            return self.source.rows(name, start, stop)
        experts = self._fused[name].parts[start:stop]
        return fuse([[self.source.rows(part, 0, self.source.shape(part)[0]) for part in parts] for parts in experts])

    def _write(self, descriptor: int, item: Item[str]) -> None:
        _, offset, spec = self._places[item.what]
        rows = self._rows(item.what, item.start, item.stop).to(spec.dtype).contiguous()
        if rows.numel() == 0:
            return
        position = offset + item.start * (item.nbytes // (item.stop - item.start))
        _write_at(descriptor, rows.reshape(-1).view(torch.uint8).numpy().data, position)


def _write_at(descriptor: int, data: ReadableBuffer, position: int) -> None:
    """Write all of `data`; one `pwrite` may write only a part."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, position)
        left, position = left[count:], position + count


def _check(path: Path, header: bytes, tensors: list[ExportedTensor]) -> None:
    (length,) = struct.unpack("<Q", header[:8])
    expected = 8 + length + sum(spec.nbytes for spec in tensors)
    if path.stat().st_size != expected:
        raise RuntimeError(f"{path}: {path.stat().st_size} bytes instead of {expected}")
