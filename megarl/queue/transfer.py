"""The trajectory queue over TransferQueue: one row per sample, one column per field, unpadded.

The rollout controller starts TransferQueue's actors (`start_queue`); everybody else attaches by name
(`QueueWriter.attach`, `QueueReader.attach`). Names and the partition carry the run and its attempt, so that two runs
on one Ray cluster, or a restarted one, never see each other's rows.

Why the library's low-level calls and not `transfer_queue.init()` (0.1.11): `init` uses one fixed controller name per
cluster, ignores its config when one exists, and waits without bound for it.
Every call here ends within `timeout_s` or raises TimeoutError.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from megarl.queue.streams import STREAMS, stream_column, stream_row
from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
BACKEND = "SimpleStorage"
COLUMNS = ("prompt_ids", "response_ids", "response_mask", "rollout_logprobs", "versions")


def quiet_library() -> None:
    """Environment that TransferQueue reads at import: one thread (it warns at every call otherwise), errors only."""
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    os.environ.setdefault("TQ_CLIENT_ZMQ_IO_THREADS", "1")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")


def _controller_name(partition: str) -> str:
    return f"TransferQueueController.{partition}"


def bounded(function: Callable[[], T], timeout_s: float, what: str) -> T:
    """Run a library call that cannot be bounded from outside in a daemon thread; TimeoutError after `timeout_s`.

    The thread of a late call stays where it is: one that waits inside Ray crashes the process at `ray.shutdown()`
    (Ray 2.60.0), so what is known to wait for long is asked for before it is called.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(f"{what} did not end within {timeout_s:.0f} s")
    if failure:
        raise failure[0]
    return outcome[0]


class QueueServer:
    """Handles of the queue's actors; they live as long as this process (or until `close`)."""

    def __init__(self, controller: Any, storage: dict[str, Any]) -> None:
        self.controller = controller
        self.storage = storage

    def close(self) -> None:
        """Kill the actors; rows are lost."""
        import ray

        for handle in [*self.storage.values(), self.controller]:
            ray.kill(handle)


def start_queue(
    partition: str, *, namespace: str, storage_units: int, node_resource: str | None, timeout_s: float
) -> QueueServer:
    """Start controller and storage units of a run; the caller's process owns them.

    `node_resource`: a Ray resource that only the pool's nodes have; None = every node (single-host runs).
    Needs 1 + storage_units logical CPUs. TimeoutError naming what is missing instead of the library's endless wait.
    """
    quiet_library()
    import ray
    from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

    # Raises ValueError if no node has the resource.
    get_node_round_robin_scheduling_strategies(storage_units, required_node_resource=node_resource)
    needed, deadline = 1 + storage_units, time.monotonic() + timeout_s
    # Asked first: an actor that finds no CPU would leave a thread waiting in Ray without end (see `bounded`).
    while (available := ray.available_resources().get("CPU", 0)) < needed:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"TransferQueue did not start within {timeout_s:.0f} s: it needs {needed} actors of 1 CPU each; "
                f"{available:g} logical CPUs were free in Ray; raise ray.num_cpus or timeouts.engine_start_s"
            )
        time.sleep(0.1)
    return bounded(
        lambda: _start(partition, namespace, storage_units, node_resource),
        max(deadline - time.monotonic(), 1.0),
        f"TransferQueue's start ({needed} actors of 1 CPU each; raise timeouts.engine_start_s)",
    )


def _start(partition: str, namespace: str, storage_units: int, node_resource: str | None) -> QueueServer:
    from importlib import resources

    import ray
    from omegaconf import OmegaConf
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.sampler import SequentialSampler
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.utils.zmq_utils import process_zmq_server_info

    defaults = OmegaConf.create((resources.files("transfer_queue") / "config.yaml").read_text())
    conf: Any = OmegaConf.merge(OmegaConf.create({}, flags={"allow_objects": True}), defaults)
    conf.backend.storage_backend = BACKEND
    conf.backend[BACKEND].num_data_storage_units = storage_units
    conf.backend[BACKEND].required_node_resource = node_resource
    controller = TransferQueueController.options(name=_controller_name(partition), namespace=namespace).remote(
        sampler=SequentialSampler(), polling_mode=True
    )
    conf.controller.zmq_info = process_zmq_server_info(controller)
    storage = StorageBootstrapProvider.get_provider(BACKEND)(conf)
    ray.get(controller.store_config.remote(conf))
    return QueueServer(controller, storage)


class _Client:
    """A TransferQueue client of its own (not the library's process-wide one), with bounded calls."""

    def __init__(self, client: Any, partition: str, timeout_s: float) -> None:
        self._client = client
        self.partition = partition
        self.timeout_s = timeout_s

    @classmethod
    def attach(cls, partition: str, namespace: str, timeout_s: float, start_timeout_s: float | None = None) -> _Client:
        """Connect to the queue of `partition`; Ray must be initialised. TimeoutError if it does not exist in time."""
        quiet_library()
        import ray

        name, deadline = _controller_name(partition), time.monotonic() + timeout_s
        conf = None
        while conf is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(f"waited {timeout_s:.0f} s for the trajectory queue {name!r} to be up")
            try:
                controller = ray.get_actor(name, namespace=namespace)
                conf = ray.get(controller.get_config.remote(), timeout=remaining)
            except (ValueError, ray.exceptions.GetTimeoutError):
                conf = None
            if conf is None:
                time.sleep(0.05)
        return cls(bounded(lambda: _connect(conf), timeout_s, f"attaching to {name}"), partition, timeout_s)

    async def submit(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Await a client coroutine from any event loop."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._client._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self.timeout_s)
        except TimeoutError:
            raise TimeoutError(self._late(what)) from None

    def call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """The same from a thread without a loop."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._client._loop)
        try:
            return future.result(self.timeout_s)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(self._late(what)) from None

    def _late(self, what: str) -> str:
        return f"process {os.getpid()} waited {self.timeout_s:.0f} s for the trajectory queue to {what}"

    def close(self) -> None:
        self._client.close()

    async def put(self, keys: list[str], fields: Any, tags: list[dict[str, Any]]) -> None:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=True)
        if meta.size != len(keys):
            raise RuntimeError(f"the trajectory queue made {meta.size} rows for {len(keys)} keys")
        meta.update_custom_meta(tags)
        await self._client.async_put(fields, meta)

    async def get(self, keys: list[str]) -> tuple[Any, list[dict[str, Any]]]:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=False)
        if meta.size != len(keys):
            raise KeyError(f"the trajectory queue holds {meta.size} of the {len(keys)} rows asked for: {keys[:4]}…")
        return await self._client.async_get_data(meta), meta.custom_meta

    async def tags(self) -> dict[str, dict[str, Any]]:
        return (await self._client.async_kv_list(self.partition)).get(self.partition, {})

    async def clear(self, keys: list[str]) -> None:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=False)
        if meta.size > 0:
            await self._client.async_clear_samples(meta)


def _connect(conf: Any) -> Any:
    from transfer_queue.client import TransferQueueClient

    client = TransferQueueClient(client_id=f"megarl_{os.getpid()}", controller_info=conf.controller.zmq_info)
    client.initialize_storage_manager(manager_type=BACKEND, config=conf.backend[BACKEND])
    return client


class QueueWriter:
    """Used by the controller: every finished group goes as a whole into one batched put.

    Groups that finish while a put is on its way share the next one: a put costs some milliseconds and three processes,
    whatever its size, and at the end of a step many groups finish at once.
    """

    def __init__(self, client: _Client) -> None:
        self._client = client
        self._waiting: list[tuple[Sequence[Trajectory], asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    def attach(cls, partition: str, *, namespace: str, timeout_s: float) -> QueueWriter:
        return cls(_Client.attach(partition, namespace, timeout_s))

    async def put_group(self, trajectories: Sequence[Trajectory]) -> None:
        """Write all samples of a group, failed ones too. TimeoutError after the writer's `timeout_s`."""
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        self._waiting.append((trajectories, written))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._write_all())
        await written

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            rows = [row for trajectories, _ in batch for row in trajectories]
            try:
                fields, tags = encode(rows)
                put = self._client.put([row.key for row in rows], fields, tags)
                await self._client.submit(put, f"take {len(rows)} rows")
            except Exception as error:
                for _, written in batch:
                    if not written.done():
                        written.set_exception(error)
                continue
            for _, written in batch:
                if not written.done():
                    written.set_result(None)

    async def clear(self, keys: Sequence[str]) -> None:
        """Remove rows that are settled; unknown keys are ignored."""
        await self._client.submit(self._client.clear(list(keys)), f"clear {len(keys)} rows")

    async def clear_all(self) -> None:
        """Remove every row, those of a put that is on its way included."""
        self._waiting = []
        if self._task is not None:
            await self._task
        keys = await self._client.submit(self._client.tags(), "list its rows")
        if keys:
            await self.clear(list(keys))

    def close(self) -> None:
        self._client.close()


class QueueReader:
    """Used by the trainer's DP leaders: everybody reads the tags, each fetches only its own rows."""

    def __init__(self, client: _Client) -> None:
        self._client = client

    @classmethod
    def attach(cls, partition: str, *, namespace: str, timeout_s: float) -> QueueReader:
        return cls(_Client.attach(partition, namespace, timeout_s))

    def read_tags(self, keys: Sequence[str] | None = None) -> list[SampleTag]:
        """Tags of `keys` in their order (None: all rows, sorted). KeyError if a key is not in the queue."""
        tags = self._client.call(self._client.tags(), "list its rows")
        if keys is None:
            found = [decode_tag(tag) for tag in tags.values()]
            return sorted(found, key=lambda tag: (tag.group_id, tag.sample_index))
        missing = [key for key in keys if key not in tags]
        if missing:
            raise KeyError(f"{len(missing)} of {len(keys)} rows are not in the trajectory queue: {missing[:4]}")
        return [decode_tag(tags[key]) for key in keys]

    def fetch(self, keys: Sequence[str]) -> list[Trajectory]:
        """The trajectories of `keys`, in their order. KeyError if one is missing."""
        if not keys:
            return []
        data, tags = self._client.call(self._client.get(list(keys)), f"send {len(keys)} rows")
        return decode(data, tags)

    def clear(self, keys: Sequence[str]) -> None:
        """Remove rows that are settled; unknown keys are ignored."""
        if keys:
            self._client.call(self._client.clear(list(keys)), f"clear {len(keys)} rows")

    def close(self) -> None:
        self._client.close()


def encode(trajectories: Sequence[Trajectory]) -> tuple[Any, list[dict[str, Any]]]:
    """Trajectories -> (TensorDict of jagged rows, tags). Log-probs are float32, bit for bit the engine's."""
    import torch
    from tensordict import TensorDict

    def jagged(rows: list[list[Any]], dtype: torch.dtype) -> torch.Tensor:
        # One tensor for all rows: a tensor per row costs six times as much.
        values = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
        offsets = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int64)
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    spans = [[n for s in t.versions for n in (s.version, s.start, s.end)] for t in trajectories]
    columns = {
        "prompt_ids": jagged([t.prompt_ids for t in trajectories], torch.int64),
        "response_ids": jagged([t.response_ids for t in trajectories], torch.int64),
        "response_mask": jagged([t.response_mask for t in trajectories], torch.int8),
        "rollout_logprobs": jagged([t.rollout_logprobs for t in trajectories], torch.float32),
        "versions": jagged(spans, torch.int64),
    }
    for stream in STREAMS.from_rollout:
        rows = [stream_row(stream, trajectory) for trajectory in trajectories]
        columns[stream_column(stream)] = jagged(rows, getattr(torch, stream.dtype))
    return TensorDict(columns, batch_size=len(trajectories)), [_tag(trajectory) for trajectory in trajectories]


def _tag(trajectory: Trajectory) -> dict[str, Any]:
    return asdict(trajectory.tag) | {"failure": trajectory.failure}


def decode_tag(tag: dict[str, Any]) -> SampleTag:
    """One row's tag."""
    return SampleTag(**{name: value for name, value in tag.items() if name != "failure"})


def decode(data: Any, tags: Sequence[dict[str, Any]]) -> list[Trajectory]:
    """Inverse of `encode`."""
    columns = {name: _rows(data[name]) for name in COLUMNS}
    streams = {stream.name: _rows(data[stream_column(stream)]) for stream in STREAMS.from_rollout}
    trajectories = []
    for index, tag in enumerate(tags):
        flat = columns["versions"][index]
        spans = tuple(VersionSpan(*flat[start : start + 3]) for start in range(0, len(flat), 3))
        trajectories.append(
            Trajectory(
                group_id=tag["group_id"],
                sample_index=tag["sample_index"],
                prompt_ids=columns["prompt_ids"][index],
                response_ids=columns["response_ids"][index],
                rollout_logprobs=columns["rollout_logprobs"][index],
                versions=spans,
                finish_reason=tag["finish_reason"],
                reward=tag["reward"],
                reward_components=tag["reward_components"],
                status=tag["status"],
                failure=tag["failure"],
                response_mask=columns["response_mask"][index],
                streams={name: rows[index] for name, rows in streams.items()},
            )
        )
    return trajectories


def _rows(column: torch.Tensor) -> list[list[Any]]:
    """Rows of a column as lists. The library returns a dense tensor when all rows happen to be equally long."""
    if not column.is_nested:
        rows: list[list[Any]] = column.tolist()
        return rows
    values, offsets = column.values().tolist(), column.offsets().tolist()  # type: ignore[attr-defined]
    return [values[start:end] for start, end in pairwise(offsets)]
