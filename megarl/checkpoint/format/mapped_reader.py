"""Loads a run's checkpoint from memory-mapped files: each tensor is copied once, to its destination.

torch's own reader (filesystem.py:861 of 2.13) first makes a private copy of every stored tensor in newly allocated
memory, which can take as long as the reading.
"""

from __future__ import annotations

import io
from pathlib import Path
from unittest import mock

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from megarl.checkpoint.format.hf_files import MappedFile
from megarl.checkpoint.format.megatron_files import Chunk, archived_tensor


class MappedReader(CachedMetadataFileSystemReader):
    """A `FileSystemReader` without private copies. Raises ValueError for a damaged archive."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan` into the tensors that `planner` names, as the base class does."""
        files: dict[str, MappedFile] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            name = place.relative_path
            file = files.get(name) or files.setdefault(name, MappedFile(Path(self.path) / name))
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(file.bytes(place.offset, place.offset + place.length)))
                continue
            stored = archived_tensor(file, Chunk((), (), name, place.offset, place.length), item.storage_index.fqn)
            for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                stored = stored.narrow(axis, start, length)
            target = planner.resolve_tensor(item).detach()
            if target.size() != stored.size():
                raise ValueError(f"{item.storage_index}: {list(stored.size())} stored, {list(target.size())} wanted")
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class MappedLoadStrategy(torch_strategy.TorchDistLoadShardedStrategy):
    """Megatron-Core's load strategy with `MappedReader`; the function of its module that makes a reader is replaced."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        """Load the tensors of `sharded_state_dict`, as the base class does."""

        def make_reader(directory: str | Path, cache_metadata: bool = False) -> MappedReader:
            return MappedReader(directory)

        with mock.patch.object(torch_strategy, "_get_filesystem_reader", make_reader):
            return super().load(sharded_state_dict, checkpoint_dir)
