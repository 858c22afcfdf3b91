"""The trajectory queue on top of TransferQueue: unpadded rows, one for each part of a sample (`row_format.py`).

The rollout controller starts TransferQueue's actors (`start_queue`); all other processes attach by name
(`QueueWriter.attach`, `QueueReader.attach`). Actor names and the partition contain the run and its attempt, so two runs
on one Ray cluster, or a run and its restart, never see each other's rows. Every call ends within `timeout_s` or raises
TimeoutError.

`transfer_queue.init()` (0.1.11) is not used: it has one fixed controller name per cluster, ignores its config if a
controller exists, and waits for the controller without a timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from megarl.common.errors import RolloutError
from megarl.common.process.threads import call_in_thread
from megarl.queue.row_format import Row, decode, decode_tag, encode_file, encode_row, files_of, join_rows
from megarl.queue.socket_auth import lock
from megarl.queue.trajectory import SampleTag, Trajectory

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from ray.actor import ActorHandle
    from tensordict import TensorDict
    from transfer_queue.client import TransferQueueClient

logger = logging.getLogger(__name__)

T = TypeVar("T")
BACKEND = "SimpleStorage"
PUT_INTERVAL_S = 0.05  # between the starts of two puts while more groups are expected
_NO_FILES: Mapping[str, bytes] = {}
_RETRY_S = 0.5  # between calls of an unreachable process
SLICE_S = 2.0  # how often a wait checks that the queue's processes are alive


def image_key(group_id: int, name: str) -> str:
    """Return the key of the row with an image file of a group; `name`: the image's hash."""
    return f"{group_id}:image:{name}"


def quiet_library() -> None:
    """Set the environment that TransferQueue reads on import: one thread (else every call warns), errors only."""
    os.environ.setdefault("TQ_NUM_THREADS", "1")
    os.environ.setdefault("TQ_CLIENT_ZMQ_IO_THREADS", "1")
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")


def _controller_name(partition: str) -> str:
    return f"TransferQueueController.{partition}"


def bounded(function: Callable[[], T], timeout_s: float, what: str) -> T:
    """Run a library call without a timeout in a daemon thread; raise TimeoutError after `timeout_s`.

    The thread of a late call keeps running. If it waits inside Ray, the process crashes at `ray.shutdown()` (Ray
    2.60.0), so callers should first check whether a call would wait for long.
    """
    call = call_in_thread(function, name=what)
    if not wait([call], timeout_s).done:
        raise TimeoutError(f"{what} did not end within {timeout_s:.0f} s")
    return call.result(0)


class QueueServer:
    """Handles of the queue's actors, which live until `close` or the end of this process."""

    def __init__(self, controller: ActorHandle, storage: dict[str, ActorHandle]) -> None:
        self.controller = controller
        self.storage = storage

    async def check(self, timeout_s: float) -> None:
        """Raise RolloutError naming the first actor that has died or does not answer within `timeout_s`.

        Until then an unreachable actor is retried: the network may be down briefly.
        """
        for name, handle in {"the controller": self.controller, **self.storage}.items():
            try:
                async with asyncio.timeout(timeout_s):
                    await _reach(handle)
            except TimeoutError:
                raise RolloutError(f"{name} of the trajectory queue did not answer within {timeout_s:.0f} s") from None
            except Exception as error:
                raise RolloutError(f"{name} of the trajectory queue has died: {type(error).__name__}") from error

    def close(self) -> None:
        """Kill the actors; the rows are lost."""
        import ray

        for handle in [*self.storage.values(), self.controller]:
            ray.kill(handle)


async def _reach(actor: ActorHandle) -> None:
    """Wait until an actor of the queue answers; retry while it is unreachable."""
    import ray

    while True:
        try:
            await actor.get_zmq_server_info.remote()
            return
        except ray.exceptions.ActorUnavailableError as error:
            logger.warning("a process of the trajectory queue is unreachable; trying again: %s", error)
            await asyncio.sleep(_RETRY_S)


def start_queue(
    partition: str, *, namespace: str, storage_units: int, node_resource: str | None, timeout_s: float
) -> QueueServer:
    """Start the controller and the storage units of a run; the calling process owns them.

    Waits for the names and CPUs of an earlier queue whose owner has died. `node_resource`: a Ray resource that only the
    pool's nodes have; None means every node (single-host runs). Needs 1 + storage_units logical CPUs. Raises
    TimeoutError naming the missing resource (the library would wait forever), and ValueError if no node has
    `node_resource`.
    """
    quiet_library()
    lock()
    import ray
    from transfer_queue.utils.common import get_node_round_robin_scheduling_strategies

    # Called only for its ValueError if no node has the resource.
    get_node_round_robin_scheduling_strategies(storage_units, required_node_resource=node_resource)
    needed, deadline = 1 + storage_units, time.monotonic() + timeout_s
    # Checked first: an actor without a CPU would leave a thread waiting in Ray forever (see `bounded`).
    while (available := ray.available_resources().get("CPU", 0)) < needed:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"TransferQueue did not start within {timeout_s:.0f} s: it needs {needed} actors of 1 CPU each; "
                f"{available:g} logical CPUs were free in Ray; raise timeouts.engine_start_s"
            )
        time.sleep(0.1)
    _await_names([f"TransferQueueStorageUnit#{unit}" for unit in range(storage_units)], namespace, deadline)
    return bounded(
        lambda: _start(partition, namespace, storage_units, node_resource),
        max(deadline - time.monotonic(), 1.0),
        f"TransferQueue's start ({needed} actors of 1 CPU each; raise timeouts.engine_start_s)",
    )


def _await_names(names: Sequence[str], namespace: str, deadline: float) -> None:
    """Wait until no actor has one of `names`. Raises TimeoutError naming the first that still exists then."""
    import ray

    for name in names:
        while True:
            try:
                ray.get_actor(name, namespace=namespace)
            except ValueError:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the new trajectory queue waited for an earlier one's {name} to end")
            time.sleep(0.1)


def _start(partition: str, namespace: str, storage_units: int, node_resource: str | None) -> QueueServer:
    from importlib import resources

    import ray
    from omegaconf import OmegaConf
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.sampler import SequentialSampler
    from transfer_queue.storage.bootstrap import StorageBootstrapProvider
    from transfer_queue.utils.zmq_utils import process_zmq_server_info

    defaults = OmegaConf.create((resources.files("transfer_queue") / "config.yaml").read_text())
    merged = OmegaConf.merge(OmegaConf.create({}, flags={"allow_objects": True}), defaults)
    conf = cast("DictConfig", merged)  # a mapping, because `defaults` is one
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
    """A TransferQueue client, separate from the library's process-wide one, whose calls have a timeout."""

    def __init__(
        self, client: TransferQueueClient, partition: str, timeout_s: float, check: Callable[[], None], who: str = ""
    ) -> None:
        """`who`: this process's name in messages; default: its pid."""
        self._client, self._who = client, who or f"process {os.getpid()}"
        self.partition = partition
        self.timeout_s = timeout_s
        self._check = check

    @classmethod
    def attach(
        cls, partition: str, *, namespace: str, timeout_s: float, check: Callable[[], None] = lambda: None,
        who: str = "",
    ) -> Self:  # fmt: skip
        """Connect to the queue of `partition`; Ray must be initialised.

        `check` raises if the queue's processes have ended; waiting calls then soon raise the same. `who`: this
        process's name in messages; default: its pid. Raises TimeoutError if the queue is not up within `timeout_s`.
        """
        quiet_library()
        lock()
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
        client = bounded(lambda: _connect(conf), timeout_s, f"attaching to {name}")
        return cls(client, partition, timeout_s, check, who)

    async def submit(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Await a client coroutine from any event loop. Raises TimeoutError naming the action `what`."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._client._loop)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise TimeoutError(self._late(what)) from None

    def call(self, coroutine: Coroutine[Any, Any, T], what: str) -> T:
        """Run a client coroutine from a thread without an event loop.

        Raises TimeoutError like `submit`, and whatever `check`, called every few seconds, raises.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._client._loop)
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return future.result(min(SLICE_S, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                if future.done():  # it has just ended, or raised this error
                    return future.result()
            try:
                self._check()
            except BaseException:
                future.cancel()
                raise
            if time.monotonic() >= deadline:
                future.cancel()
                raise TimeoutError(self._late(what))

    def _late(self, what: str) -> str:
        return f"{self._who} waited {self.timeout_s:.0f} s (timeouts.rpc_s) for the trajectory queue to {what}"

    def close(self) -> None:
        """Close the connections to the queue, which keeps its rows."""
        self._client.close()

    async def put(self, keys: list[str], fields: TensorDict, tags: list[dict[str, str]]) -> None:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=True)
        if meta.size != len(keys):
            raise RuntimeError(f"the trajectory queue made {meta.size} rows for {len(keys)} keys")
        meta.update_custom_meta(tags)
        await self._client.async_put(fields, meta)

    async def get(self, keys: list[str]) -> tuple[TensorDict, list[dict[str, str]]]:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=False)
        if meta.size != len(keys):
            raise KeyError(f"the trajectory queue holds {meta.size} of the {len(keys)} requested rows: {keys[:4]}…")
        return await self._client.async_get_data(meta), meta.custom_meta

    async def tags(self) -> dict[str, dict[str, str]]:
        return (await self._client.async_kv_list(self.partition)).get(self.partition, {})

    async def tags_of(self, keys: list[str]) -> list[dict[str, str]]:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=False)
        return list(meta.custom_meta) if meta.size else []

    async def remove(self, keys: list[str]) -> None:
        meta = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=self.partition, create=False)
        if meta.size > 0:
            await self._client.async_clear_samples(meta)


def _connect(conf: DictConfig) -> TransferQueueClient:
    from transfer_queue.client import TransferQueueClient

    client = TransferQueueClient(client_id=f"megarl_{os.getpid()}", controller_info=conf.controller.zmq_info)
    client.initialize_storage_manager(manager_type=BACKEND, config=conf.backend[BACKEND])
    return client


class _Put:
    """Groups that are written together. `due` is set to wait for no more groups. `task` writes them."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}  # by key
        self.due = asyncio.Event()


class QueueWriter(_Client):
    """The controller's side of the queue. It writes every finished prompt group as a whole, in one batched put.

    Groups that finish shortly after a put share the next one. A put takes some milliseconds and three processes,
    whatever its size: with one group of 16 rows it costs twice as much per row as with four groups.
    """

    _next: _Put | None = None  # accepts more groups
    _writing: asyncio.Task[None] | None = None
    _next_at = 0.0

    async def put_group(
        self, trajectories: Sequence[Trajectory], files: Mapping[str, bytes] = _NO_FILES, *, more: bool = False
    ) -> None:
        """Write all samples of a group, including failed ones. Raises TimeoutError after the writer's `timeout_s`.

        `files`: the prompt's image files by hash; each becomes a row (`image_key`). `more`: other groups will follow,
        so this one may wait for some of them (`PUT_INTERVAL_S`).
        """
        # Encoded now: encoding all groups at the put would block the event loop for longer.
        rows = {trajectory.key: encode_row(trajectory) for trajectory in trajectories}
        rows |= {image_key(trajectories[0].group_id, name): encode_file(file) for name, file in files.items()}
        if self._next is None:
            self._next = _Put()
            self._next.task = asyncio.get_running_loop().create_task(self._write(self._next, self._writing))
        put = self._next
        put.rows |= rows
        if not more:
            put.due.set()
        await asyncio.shield(put.task)

    async def _write(self, put: _Put, before: asyncio.Task[None] | None) -> None:
        """Write groups in one put, once the previous put has ended and this one is due."""
        if before is not None:
            await asyncio.wait([before], timeout=self.timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._next_at - time.monotonic()):
                await put.due.wait()
        self._next, self._writing = None, put.task
        self._next_at = time.monotonic() + PUT_INTERVAL_S
        fields, tags = join_rows(put.rows.values())
        written = self.put(list(put.rows), fields, tags)
        await self.submit(written, f"take {len(put.rows)} rows")

    async def clear(self, keys: Sequence[str]) -> None:
        """Remove rows; unknown keys are ignored."""
        await self.submit(self.remove(list(keys)), f"clear {len(keys)} rows")

    async def settle(self) -> None:
        """Wait for the put in progress to end; cancel calls of `put_group` that are not part of it."""
        if self._next is not None:
            self._next.task.cancel()
            self._next = None
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=self.timeout_s)

    async def clear_all(self) -> None:
        """Remove every row, including those of the put in progress (see `settle`)."""
        await self.settle()
        keys = await self.submit(self.tags(), "list its rows")
        if keys:
            await self.clear(list(keys))


class QueueReader(_Client):
    """The trainer's side of the queue: each DP leader reads all tags, and fetches its own rows and those it records."""

    def read_tags(self, keys: Sequence[str]) -> list[SampleTag]:
        """Return the tags of `keys` in order. Raises KeyError if one is not in the queue."""
        if not keys:
            return []
        found = self.call(self.tags_of(list(keys)), f"send the tags of {len(keys)} rows")
        if len(found) != len(keys):
            present = self.call(self.tags(), "list its rows")
            missing = [key for key in keys if key not in present]
            absent = len(keys) - len(found)
            raise KeyError(f"{absent} of {len(keys)} rows are not in the trajectory queue: {missing[:4]}")
        return [decode_tag(tag) for tag in found]

    def fetch_images(self, rows: Sequence[Trajectory]) -> dict[str, bytes]:
        """Return the image files of rows by hash, each once. Raises KeyError if one is missing."""
        places = {image.hash: image_key(row.group_id, image.hash) for row in rows for image in row.images}
        if not places:
            return {}
        data, _ = self.call(self.get(list(places.values())), f"send {len(places)} images")
        return dict(zip(places, files_of(data), strict=True))

    def fetch(self, keys: Sequence[str]) -> list[Trajectory]:
        """Return the trajectories of `keys` in order. Raises KeyError if one is missing."""
        if not keys:
            return []
        data, tags = self.call(self.get(list(keys)), f"send {len(keys)} rows")
        return decode(data, tags)
