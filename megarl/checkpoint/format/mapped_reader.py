"""Resumes from checkpoints in memory-mapped files: each tensor is copied once, and nothing in them is executed.

torch's own reader (filesystem.py:861 of 2.13) first copies every stored tensor into newly allocated memory, which can
take as long as reading it. It also unpickles the index and stored objects without restriction. No file of a checkpoint
is trusted, whoever wrote it, so every resume uses this module.

Megatron-Core's common state is a pickle too: the file `common.pt`, or else an object among the shards. megarl needs
nothing from it and does not read it.
"""

import io
from pathlib import Path
from unittest import mock

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from megarl.checkpoint.format.megatron_files import Chunk, archived_tensor
from megarl.checkpoint.format.shard_index import load_plain, read_metadata
from megarl.models.hf.directory import MappedFile


def load_shards(state: ShardedStateDict, directory: Path | str, strategy: object) -> StateDict:
    """Load `state` with `strategy` through Megatron-Core's `dist_checkpointing.load`. Collective.

    Raises Megatron-Core's CheckpointingException, and the strategy's errors.
    """
    with mock.patch.object(serialization, "load_common_state_dict", lambda directory: {}):
        loaded: StateDict = dist_checkpointing.load(state, str(directory), strategy)
        return loaded


class MappedReader(FileSystemReader):
    """A `FileSystemReader` that makes no private copies and trusts no file.

    Raises ValueError for a file that is damaged or would run code.
    """

    _metadata: Metadata | None = None

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the index, read once; torch's method would run code from a crafted index."""
        if self._metadata is None:
            self._metadata = read_metadata(Path(self.path))
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan` into the tensors that `planner` names, as the base class does."""
        files: dict[str, MappedFile] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            name = place.relative_path
            file = files.get(name) or files.setdefault(name, MappedFile(Path(self.path) / name))
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _plain_object(file, place, item.storage_index.fqn))
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


def _plain_object(file: MappedFile, place: _StorageInfo, key: str) -> io.BytesIO:
    """Return a stored object, saved again after a check: torch's planner unpickles it without restriction.

    Raises ValueError if it holds anything but tensors and plain values.
    """
    stored = io.BytesIO(file.bytes(place.offset, place.offset + place.length))
    try:
        value = load_plain(stored)
    except ValueError as error:
        raise ValueError(f"{file.path}: {key} cannot be read as plain data: {error}") from error
    copy = io.BytesIO()
    torch.save(value, copy)
    copy.seek(0)
    return copy


class MappedLoadStrategy(torch_strategy.TorchDistLoadShardedStrategy):
    """Megatron-Core's load strategy with `MappedReader`, which replaces the reader of its module."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *args: object) -> StateDict:
        """Load the tensors of `sharded_state_dict`, as the base class does. `args`: of Megatron-Core.

        Raises ValueError, with the message of the first rank that failed, for a file that is damaged or unsafe.
        """
        reader = MappedReader(checkpoint_dir)
        reader.read_metadata()  # later, torch would hide its error

        def make_reader(directory: str | Path, *args: object, **kwargs: object) -> MappedReader:
            return reader

        with mock.patch.object(torch_strategy, "_get_filesystem_reader", make_reader):
            try:
                return super().load(sharded_state_dict, checkpoint_dir, *args)
            except CheckpointException as error:  # not an Exception; has each rank's traceback
                rank, (cause, _) = min(error.failures.items())
                raise ValueError(f"{checkpoint_dir} cannot be loaded: rank {rank}: {cause}") from error
