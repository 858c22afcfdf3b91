"""One save in the background: Megatron-Core plans it, a thread of this process writes it.

Megatron-Core's own asynchronous writer forks the trainer, which holds gloo, NCCL and Ray threads, and asks for a
manager process that outlives a killed rank; its persistent one dies without CUDA. Writing is system calls, for which
a thread of the trainer does not hold the interpreter. No file is written outside the thread, and no collective runs in
it: a full disk on one rank leaves nobody waiting.
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
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megarl.checkpoint.format import faults
from megarl.checkpoint.format.manifest import FileEntry

logger = logging.getLogger(__name__)

FILES_PER_RANK = 2


@dataclass
class Written:
    """What one rank's thread has done: its files with their digests, torch's write results, or what went wrong."""

    files: dict[str, FileEntry]
    results: list[Any]
    error: str | None
    seconds: float


class BackgroundWrite:
    """Built on the main thread of every rank (collective), then `start`, which is local."""

    def __init__(self, state: dict[str, Any], directory: Path, *, validate: bool = True) -> None:
        """Plan, and copy to host memory what training is about to change. `validate`: no shard twice, none missing."""
        self.directory = directory
        sharded, _ = save_preprocess(state, validate)
        dict_list_map_inplace(_snapshot, sharded)
        planned = plan_save(sharded, directory)
        self._writer: FileSystemWriterAsync = planned[0]
        self.metadata = planned[1]
        self._buckets = FileSystemWriterAsync.preload_tensors(self._writer.write_buckets or [], False)

    def start(self, report: Callable[[Written], None]) -> None:
        """Write in a daemon thread (a rank that is ended does not wait for its disk), which calls `report` last."""
        threading.Thread(target=lambda: report(self._write_all()), name="checkpoint-writer", daemon=True).start()

    def finish(self, results: list[list[Any]]) -> None:
        """Rank 0, after every rank's thread: write torch's `.metadata`. OSError if the disk refuses."""
        faults.reached("metadata")
        self._writer.finish(self.metadata, results)

    def _write_all(self) -> Written:
        started, files, results = time.perf_counter(), {}, []
        error: str | None = None
        torch.serialization.set_crc32_options(False)  # the digests say more, at a fraction of the time
        try:
            # Side by side: while the disk works on one file, the next one is copied to the page cache.
            # (Daemons, unlike those of concurrent.futures: an ended rank does not wait for them.)
            with ThreadPool(FILES_PER_RANK) as pool:
                for name, entry, written in pool.map(self._write_file, range(len(self._buckets))):
                    files[name] = entry
                    results += written
        except Exception as failure:
            logger.exception("writing %s", self.directory)
            error = str(failure) or repr(failure)
        self._buckets = []
        return Written(files, results, error, time.perf_counter() - started)

    def _write_file(self, index: int) -> tuple[str, FileEntry, list[Any]]:
        bucket = self._buckets[index]
        results = self._write(index, bucket)
        entry = FileEntry.of(Path(bucket[0]))
        faults.reached("shard")
        return bucket[1], entry, results

    def _write(self, index: int, bucket: Any) -> list[Any]:
        """One file, fsynced, by Megatron-Core's own function. Raises what it ran into."""
        outcome: queue.Queue[Any] = queue.Queue()
        count: queue.Queue[int] = queue.Queue()
        count.put(index)
        FileSystemWriterAsync.write_preloaded_data(_transforms(self._writer), index, bucket, outcome, count, True)
        _, result = outcome.get_nowait()
        if isinstance(result, Exception):
            raise result
        written: list[Any] = result
        return written


def plan_save(sharded: dict[str, Any], directory: Path) -> tuple[FileSystemWriterAsync, Any]:
    """Who writes which shard to which file: (this rank's writer, torch's metadata on rank 0). Collective, no I/O.

    Replicas share the work: what several data-parallel ranks hold is split among them.
    """
    strategy = _PlanOnly("torch_dist", 1, thread_count=FILES_PER_RANK)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() > 1:
        FullyParallelSaveStrategyWrapper(strategy, group).apply_saving_parallelization(sharded)
    planned: tuple[FileSystemWriterAsync, Any] = strategy.async_save(sharded, directory)
    return planned


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron-Core's strategy up to the plan: its own last stage would fork, and leave peers waiting on an error."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any) -> Any:
        return writer, save_state_dict_ret[1]


def _transforms(writer: FileSystemWriterAsync) -> list[Any]:
    return [writer.transforms] if hasattr(writer, "transforms") else []


def _snapshot(value: Any) -> Any:
    """A CPU tensor that is not a view would be written as it is then, not as it is now: Megatron counts on a fork."""
    if isinstance(value, ShardedTensor) and value.data is not None and value.data.device.type == "cpu":
        data = value.data.detach()
        is_view = data.untyped_storage().nbytes() != data.numel() * data.itemsize
        value.data = data if is_view else data.clone()  # views are copied by the writer
    return value
