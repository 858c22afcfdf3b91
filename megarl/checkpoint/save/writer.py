"""Writes a save in the background: Megatron-Core plans it, and a thread of this process writes it.

Megatron-Core's asynchronous writer forks the trainer with its gloo, NCCL and Ray threads, and needs a manager process
that outlives a killed rank; its persistent writer fails without CUDA. Writing is system calls, which release the GIL.
The thread runs no collective: if one rank's disk is full, no other rank waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from pydantic import TypeAdapter
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from megarl import platforms
from megarl.checkpoint.format.manifest import FileEntry
from megarl.common.process.memory_tuning import collections_paused

logger = logging.getLogger(__name__)

FILES_PER_RANK = 2
_OWN_WRITER = "mcore"  # Megatron-Core's; its default needs the package nvidia-resiliency-ext
# Megatron-Core's description of one file: path, name, and (item, value) pairs of bytes and of tensors.
WriteBucket: TypeAlias = tuple[str, str, tuple[list[Any], list[Any]]]


@dataclass(frozen=True)
class WrittenItem:
    """The fields of torch's WriteResult of one item: a shard, or an object."""

    name: str
    offset: tuple[int, ...] | None
    index: int | None
    bytes: int
    file: str
    start: int
    length: int

    @classmethod
    def of(cls, result: WriteResult) -> WrittenItem:
        """Return the fields of a result. Raises ValueError if it is not the filesystem writer's."""
        index, info = result.index, result.storage_data
        if type(info) is not _StorageInfo or info.transform_descriptors:
            raise ValueError(f"the result of writing {index.fqn} is of an unknown form: {info!r}")
        offset = None if index.offset is None else tuple(index.offset)
        return cls(index.fqn, offset, index.index, result.size_in_bytes, info.relative_path, info.offset, info.length)

    def result(self) -> WriteResult:
        """Return torch's result with these fields."""
        index = MetadataIndex(self.name, self.offset, self.index)
        return WriteResult(index, self.bytes, _StorageInfo(self.file, self.start, self.length))


@dataclass(frozen=True)
class Written:
    """The result of one rank's thread: files with digests, their items, or the error."""

    files: dict[str, FileEntry]
    items: list[WrittenItem]
    error: str | None
    seconds: float

    def to_text(self) -> str:
        """Return the result as JSON."""
        return TypeAdapter(Written).dump_json(self).decode()

    @classmethod
    def from_text(cls, text: str) -> Written:
        """Parse the result of `to_text`, without running code. Raises ValueError for any other text."""
        return TypeAdapter(cls).validate_json(text, strict=True)


class BackgroundWrite:
    """One rank's save. Create it collectively, on the main thread of every rank; `start` is local."""

    def __init__(self, state: dict[str, Any], directory: Path, *, validate: bool = True) -> None:
        """Plan the save, and copy all tensors that training will change to host memory.

        `validate`: check that every shard is there exactly once.
        """
        self.directory = directory
        with collections_paused():  # a plan is many objects, and training waits for it
            sharded, _ = save_preprocess(state, validate)
            dict_list_map_inplace(_snapshot, sharded)
            planned = plan_save(sharded, directory)
        self._writer: FileSystemWriterAsync = planned[0]
        self.metadata = planned[1]
        self._buckets = copy_to_host(self._writer.write_buckets or [])

    def start(self, report: Callable[[Written], None]) -> threading.Thread:
        """Write in a daemon thread, which does not delay the rank's end and finally calls `report`; return it."""
        thread = threading.Thread(target=lambda: report(self._write_all()), name="checkpoint-writer", daemon=True)
        thread.start()
        return thread

    def finish(self, items: list[list[WrittenItem]]) -> None:
        """Write torch's `.metadata`, on rank 0, after the threads of all ranks have ended. Raises OSError."""
        self._writer.finish(self.metadata, [[item.result() for item in of_rank] for of_rank in items])

    def _write_all(self) -> Written:
        started, files = time.perf_counter(), {}
        items: list[WrittenItem] = []
        error: str | None = None
        try:
            # In parallel: while the disk writes one file, the next one is copied to the page cache. Unlike those of
            # concurrent.futures these threads are daemons, which do not delay the end of the rank. They write no CRCs,
            # an option of each thread: digests detect more, in a fraction of the time.
            with ThreadPool(FILES_PER_RANK, torch.serialization.set_crc32_options, (False,)) as pool:
                for name, entry, written in pool.map(self._write_file, range(len(self._buckets))):
                    files[name] = entry
                    items += map(WrittenItem.of, written)
        except Exception as failure:
            logger.exception("writing %s", self.directory)
            error = str(failure) or repr(failure)
        self._buckets = []
        return Written(files, items, error, time.perf_counter() - started)

    def _write_file(self, index: int) -> tuple[str, FileEntry, list[WriteResult]]:
        """Write one file. Return its name, its manifest entry and torch's results."""
        bucket = self._buckets[index]
        results = self._write(index, bucket)
        entry = FileEntry.of(Path(bucket[0]))
        return bucket[1], entry, results

    def _write(self, index: int, bucket: WriteBucket) -> list[WriteResult]:
        """Write and fsync one file with Megatron-Core's function. Raises the exception that it returns."""
        outcome: queue.Queue[tuple[int, list[WriteResult] | Exception]] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcome, count, True)
        _, result = outcome.get_nowait()
        if isinstance(result, Exception):
            raise result
        return result


def copy_to_host(buckets: list[WriteBucket]) -> list[WriteBucket]:
    """Copy the tensors of all buckets to host memory; return when all copies are complete.

    From a GPU they go to pinned memory asynchronously: pageable copies of some 10 GB per rank would delay the step for
    seconds. torch's allocator keeps the pinned memory for the next save. Without CUDA nothing is copied here:
    `_snapshot` has copied tensors that will change.
    """
    copied: list[WriteBucket] = FileSystemWriterAsync.preload_tensors(buckets, platforms.current().is_cuda)
    return copied


def plan_save(sharded: dict[str, Any], directory: Path) -> tuple[FileSystemWriterAsync, Metadata | None]:
    """Plan which rank writes which shard to which file. Return this rank's writer, and torch's metadata on rank 0.

    Collective, without I/O. Shards that several data-parallel ranks hold are divided among them. Raises RuntimeError on
    every rank, with the message of the first rank that failed, if one cannot plan its part.
    """
    strategy = _PlanOnly("torch_dist", 1, thread_count=FILES_PER_RANK)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        FullyParallelSaveStrategyWrapper(strategy, group).apply_saving_parallelization(sharded)
    try:
        planned: tuple[FileSystemWriterAsync, Metadata | None] = strategy.async_save(sharded, directory, _OWN_WRITER)
    except CheckpointException as error:  # not an Exception: the run would not report it
        rank, (cause, _) = min(error.failures.items())
        raise RuntimeError(f"the save to {directory} cannot be planned: rank {rank}: {cause}") from error
    return planned


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron-Core's strategy without its last stage, which forks, and leaves other ranks waiting after an error."""

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, save_state_dict_ret: tuple[object, Metadata | None], *args: object
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        return writer, save_state_dict_ret[1]


def _snapshot(value: object) -> object:
    """Copy a CPU tensor that is not a view: Megatron relies on a fork and does not copy it before writing."""
    if isinstance(value, ShardedTensor) and value.data is not None and value.data.device.type == "cpu":
        data = value.data.detach()
        is_view = data.untyped_storage().nbytes() != data.numel() * data.itemsize
        value.data = data if is_view else data.clone()  # the writer copies views itself
    return value
