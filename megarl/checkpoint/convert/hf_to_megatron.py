"""Converts Hugging Face to Megatron: FileSystemWriter writes a `torch_dist` checkpoint from a lazy plan.

There is neither a model nor a state dict: tensors are read from Hugging Face files when the writer needs them.
"""

import io
import json
import shutil
from pathlib import Path
from typing import TypedDict

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.convert.target import writing
from megarl.checkpoint.convert.workers import Item, ReportBytes, pack, split, unit_bytes
from megarl.checkpoint.format.keys import StoredTensor, content_metadata, stored_tensors
from megarl.checkpoint.format.manifest import FileEntry, Manifest, fsync, write_durably
from megarl.checkpoint.format.megatron_files import copy_pieces, source_pieces
from megarl.common.errors import ConversionError
from megarl.models.hf.directory import HFDirectory, fingerprint, left_out_note
from megarl.models.hf.export import copy_side_files
from megarl.models.hf.model_files import COMMON_FILE, FORMAT_FILE, HF_FILES, RELEASE, SHARD_INDEX, TRACKER


class LazySavePlanner(DefaultSavePlanner):
    """Plans the units of one checkpoint as if each were a rank; `resolve_data` builds one item's tensor.

    It is a view of the memory-mapped source if its rows are contiguous there, and a copy if they are interleaved (QKV)
    or converted to another dtype.
    """

    def __init__(self, source: HFDirectory, units: list[list[Item[StoredTensor]]], dtypes: dict[str, torch.dtype]):
        super().__init__()
        self._source, self._units, self._dtypes = source, units, dtypes
        self.report: ReportBytes = lambda count: None  # called with the bytes of each requested item
        self.last = ""  # the key that the writer requested last
        self._items = {(item.what.key, item.start): item for unit in units for item in unit}

    def plans(self) -> tuple[list[SavePlan], Metadata]:
        """Return one plan per unit, and the metadata of all items, from torch's default planner."""
        return create_default_global_save_plan([SavePlan([self._write_item(i) for i in unit]) for unit in self._units])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Return the rows of one item, on the CPU."""
        offset = write_item.index.offset
        item = self._items[write_item.index.fqn, offset[0] if offset else 0]
        self.last = item.what.key
        self.report(item.nbytes)
        return stored_rows(self._source, item.what, item.start, item.stop, self._dtypes[item.what.key])

    def _write_item(self, item: Item[StoredTensor]) -> WriteItem:
        stored, dtype = item.what, self._dtypes[item.what.key]
        offsets = torch.Size([item.start, *[0] * (len(stored.shape) - 1)])
        sizes = torch.Size([item.stop - item.start, *stored.shape[1:]])
        data = TensorWriteData(
            ChunkStorageMetadata(offsets=offsets, sizes=sizes), TensorProperties(dtype=dtype), torch.Size(stored.shape)
        )
        return WriteItem(MetadataIndex(stored.key, offsets), WriteItemType.SHARD, tensor_data=data)


def stored_rows(source: HFDirectory, stored: StoredTensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows [start, stop) along axis 0 of a stored tensor, in `dtype`, from the Hugging Face files.

    Raises ValueError for a rule that joins several tensors along axis 1.
    """
    entry = stored.entry
    if entry.rule.axis == 1:
        if len(entry.names) > 1:
            raise ValueError(f"{entry.megatron}: several tensors joined along axis 1 are not supported")
        return source.rows(entry.names[0], start, stop).to(dtype)
    pieces = source_pieces(stored, start, stop)
    if len(pieces) == 1 and pieces[0].source is not None:
        (piece,) = pieces
        return source.rows(entry.names[pieces[0].source], piece.start, piece.stop).to(dtype)
    out = torch.empty((stop - start, *stored.shape[1:]), dtype=dtype)
    copy_pieces(out, entry, pieces, source)
    return out


_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
TensorPlace = tuple[str, list[int], int, int]  # of an item: key, offset in its tensor, bytes, first byte in the file


class UnitFile(TypedDict):
    """The `.distcp` file of a unit, in JSON."""

    file: str
    bytes: int
    blake3: str
    places: list[TensorPlace]


class HFToMegatron:
    """The conversion of one Hugging Face directory; `dtype=None` keeps dtypes. Buffers become fp32."""

    kind = "import"

    def __init__(self, source: HFDirectory, dtype: torch.dtype | None) -> None:
        self.source = source
        self.dtype = dtype
        self.stored = [each for parts in stored_tensors(source.entries).values() for each in parts]
        self._dtypes = {
            each.key: torch.float32 if each.entry.rule.stays_fp32 else dtype or self._own_dtype(each)
            for each in self.stored
        }
        total = sum(self._dtypes[each.key].itemsize * torch.Size(each.shape).numel() for each in self.stored)
        self.units = pack(
            (item for each in self.stored for item in split(each, each.shape, self._dtypes[each.key])),
            unit_bytes(total),
        )
        self.sizes = [sum(item.nbytes for item in unit) for unit in self.units]
        self.tensors = len(source.names())
        # Made before the workers are forked; otherwise each of them would make it.
        self._planner = LazySavePlanner(source, self.units, self._dtypes)
        plans, self._metadata = self._planner.plans()
        self._plans: list[SavePlan] = _Writer(source.path).prepare_global_plan(plans)

    def plan(self) -> dict[str, object]:
        """Return, as JSON, what a resumed conversion must have in common with the interrupted one."""
        return {
            "kind": self.kind,
            "source": str(self.source.path.absolute()),
            "files": fingerprint([*self.source.files(), self.source.path / "config.json"]),
            "dtype": str(self.dtype),
            "units": len(self.units),
            "keys": [each.key for each in self.stored],
        }

    def prepare(self, partial: Path) -> None:
        """Make the step directory."""
        (partial / RELEASE).mkdir(exist_ok=True)

    def write_unit(self, partial: Path, number: int, report: ReportBytes) -> UnitFile:
        """Write and fsync one `.distcp` file; return the places of its items, and its digest."""
        unit = self.units[number]
        for item in unit:
            self._will_need(item)
        self._planner.report = report
        writer = _Writer(partial / RELEASE)
        path = partial / RELEASE / f"__{number}_0.distcp"
        with writing(path, lambda: self._planner.last):
            results = writer.write_data(self._plans[number], self._planner).wait()
        places = [(r.index.fqn, list(r.index.offset or ()), r.size_in_bytes, r.storage_data.offset) for r in results]
        entry = FileEntry.of(path)
        return {"file": path.name, "bytes": entry.bytes, "blake3": entry.blake3, "places": places}

    def finish(self, partial: Path, results: dict[int, UnitFile]) -> None:
        """Write index, common state, Hugging Face files, manifest and tracker, in this order."""
        step = partial / RELEASE
        written = [[_write_result(result, place) for place in result["places"]] for result in results.values()]
        with writing(step / SHARD_INDEX):
            _Writer(step).finish(self._metadata, written)
        common = io.BytesIO()
        torch.save({"content_metadata": content_metadata(), "iteration": 0, "checkpoint_version": 3.0}, common)
        write_durably(step / COMMON_FILE, common.getvalue())
        shutil.rmtree(step / HF_FILES, ignore_errors=True)
        (step / HF_FILES).mkdir()
        with writing(step / HF_FILES):
            copy_side_files(self.source.path, step / HF_FILES, self.dtype or self._dtypes[self.stored[0].key])
        side_files = sorted((step / HF_FILES).rglob("*"))
        for path in side_files:
            fsync(path)
        write_durably(step / FORMAT_FILE, json.dumps(_FORMAT).encode())
        files = {result["file"]: FileEntry(result["bytes"], result["blake3"]) for result in results.values()}
        others = [step / name for name in (SHARD_INDEX, COMMON_FILE, FORMAT_FILE)]
        others += [path for path in side_files if path.is_file()]
        files |= {str(path.relative_to(step)): FileEntry.of(path) for path in others}
        Manifest(0, files).write(step)
        write_durably(partial / TRACKER, f"{RELEASE}\n".encode())

    def summary(self) -> str:
        """Return the number of keys and shards as text, and what was left out."""
        note = left_out_note(self.source.left_out, self.source.info)
        return f"{len(self.stored)} keys in {len(self.units)} shards{note and f' ({note})'}"

    def _own_dtype(self, stored: StoredTensor) -> torch.dtype:
        names = stored.entry.names
        if stored.suffix:
            pieces = source_pieces(stored, 0, stored.shape[0])
            names = tuple(names[source] for source in {piece.source for piece in pieces if piece.source is not None})
        dtypes = {self.source.dtype(name): name for name in names}
        if len(dtypes) > 1:
            mixed = ", ".join(f"{name} in {self.source.file(name)} is {dtype}" for dtype, name in dtypes.items())
            raise ConversionError(
                f"one Megatron tensor would be made of several dtypes: {mixed}; choose one with --dtype"
            )
        return next(iter(dtypes))

    def _will_need(self, item: Item[StoredTensor]) -> None:
        entry = item.what.entry
        for piece in source_pieces(item.what, item.start, item.stop):
            if piece.source is not None and entry.rule.axis != 1:
                self.source.will_need(entry.names[piece.source], piece.start, piece.stop)


class _Writer(FileSystemWriter):
    """Writes and fsyncs one file per unit."""

    def __init__(self, step: Path) -> None:
        super().__init__(step, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.set_up_storage_writer(True)
        # torch.load ignores CRCs, which take longer than everything else; the manifest has digests.
        torch.serialization.set_crc32_options(False)


def _write_result(result: UnitFile, place: TensorPlace) -> WriteResult:
    key, offset, size, begin = place
    return WriteResult(MetadataIndex(key, torch.Size(offset)), size, _StorageInfo(result["file"], begin, size))
