"""A save planner without a state dict: tensors are read from Hugging Face files when the writer asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megarl.checkpoint.convert.units import Item, convert
from megarl.checkpoint.convert.workers import ReportBytes
from megarl.checkpoint.format.hf_files import HFDirectory
from megarl.checkpoint.format.keys import StoredTensor
from megarl.checkpoint.format.megatron_files import source_pieces

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, StorageMeta


class LazySavePlanner(SavePlanner):
    """Plans the units of one checkpoint as if each were a rank; `resolve_data` builds one item's tensor.

    The tensor is a view of the memory-mapped source where its rows are contiguous there, and a copy where they are
    interleaved (QKV) or converted to another dtype.
    """

    def __init__(self, source: HFDirectory, units: list[list[Item[StoredTensor]]], dtypes: dict[str, torch.dtype]):
        self._source, self._units, self._dtypes = source, units, dtypes
        self.report: ReportBytes = lambda count: None  # is called with the bytes of each item that the writer asks for
        self.last = ""  # the key that the writer asked for last
        self._items = {(item.what.key, item.start): item for unit in units for item in unit}

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing, because there is no state dict."""

    def create_local_plan(self) -> SavePlan:
        """Return all items as one plan."""
        return SavePlan([self._write_item(item) for unit in self._units for item in unit])

    def local_plans(self) -> list[SavePlan]:
        """Return one plan per unit."""
        return [SavePlan([self._write_item(item) for item in unit]) for unit in self._units]

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans with the metadata of all their items, as torch's default planner makes them."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan as it is: there is only one writer."""
        return new_plan

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
    """Return rows [start, stop) along axis 0 of a stored tensor, in dtype `dtype`, from the Hugging Face files.

    Raises ValueError for a rule that joins several tensors along axis 1.
    """
    entry = stored.entry
    if entry.rule.axis == 1 and stored.half is None:
        if len(entry.names) > 1:
            raise ValueError(f"{entry.megatron}: several tensors joined along axis 1 are not supported")
        return convert(source.rows(entry.names[0], start, stop), dtype)
    pieces = source_pieces(stored, start, stop)
    if len(pieces) == 1 and pieces[0].source is not None:
        (piece,) = pieces
        return convert(source.rows(entry.names[pieces[0].source], piece.start, piece.stop), dtype)
    out = torch.empty((stop - start, *stored.shape[1:]), dtype=dtype)
    offset = 0
    for piece in pieces:
        target = out[offset : offset + piece.size]
        if piece.source is None:
            target.zero_()
        else:
            target.copy_(source.rows(entry.names[piece.source], piece.start, piece.stop))
        offset += piece.size
    return out
