"""The batches of the steps: each is taken from the pool, planned, and read from the queue.

Only rank 0 calls the rollout controller. The first rank of each data-parallel replica (its leader) reads the queue.
Both broadcast their results. If engines generate during training, a thread prepares the next batch while the current
one trains. If the run stops or fails before that batch is trained, it was never committed: a resumed run reuses its
groups or draws them again.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from megarl.cluster.client.connection import connect_ray
from megarl.cluster.client.pool_client import PoolClient
from megarl.cluster.pool.pool_process import NOTICED_S, SupervisorHandle, await_rebuilt
from megarl.common.errors import MalformedMessage, PartsLost
from megarl.common.process.threads import call_in_thread
from megarl.common.trust.object_collectives import Codec, codec_of, sendable
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config, TimeoutsConfig
from megarl.queue.dump import write_batch
from megarl.queue.row_format import Row, decode, encode_row, join_rows
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.queue.transfer import QueueReader
from megarl.rollout.orchestrator.step_batches import BatchReady, PublicationNeeded
from megarl.run.ranks.control_group import SLICE_S, BatchChannel, ChannelClosed, ControlGroup
from megarl.run.ranks.failure import PeerFailedError
from megarl.run.record.recorder import Recorder
from megarl.run.step.plan import StepPlan, plan_step
from megarl.telemetry.metrics.timer import Phase
from megarl.telemetry.trace import events
from megarl.trainer import parallel
from megarl.trainer.policy import StepRefused

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOST = "lost"  # a rank's word that the queue has died

# A text is the reason of a PublicationNeeded: a message has one kind of dataclass.
_READY: Codec[BatchReady | str | None] = codec_of(BatchReady | str | None)
_TAGS: Codec[list[SampleTag]] = codec_of(list[SampleTag])
_KEPT: Codec[bool | None] = codec_of(bool | None)
_PROBLEM: Codec[str | None] = codec_of(str | None)
_FILES: Codec[dict[str, bytes]] = codec_of(dict[str, bytes])
_ENCODED: Codec[list[Row]] = codec_of(list[tuple[bytes, dict[str, str]]])


def _decode_rows(content: bytes) -> list[Trajectory]:
    """Return the rows. Raises MalformedMessage if they cannot be read."""
    rows = _ENCODED.decode(content)
    try:
        return decode(*join_rows(rows)) if rows else []
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise MalformedMessage(f"a leader sent rows of the queue that cannot be read: {error!r}") from error


# Rows of the queue that a leader sends to the other ranks of its replica, in the queue's own form.
ROWS: Codec[list[Trajectory]] = Codec(lambda rows: _ENCODED.encode([encode_row(row) for row in rows]), _decode_rows)


class DisagreementError(RuntimeError):
    """Ranks computed different plans from the same tags. This is a bug; the batch must not be trained on."""


class QueueClient:
    """Reads the queue on a leader, from any thread. If the queue died, connects to the new one that the pool started;
    the content of the old one is lost.
    """

    def __init__(self, handle: SupervisorHandle, timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._handle, self._reader = handle, self._attach(handle)

    def read(self, rebuilds: int, question: Callable[[QueueReader], T]) -> T:
        """Return the answer of the pool's queue number `rebuilds`. Raises PartsLost if that queue has died or been
        replaced. An exception of `question` passes.
        """
        try:
            reader = self._reader_of(rebuilds)
            return question(reader)
        except (PartsLost, KeyError):
            raise
        except Exception as error:
            # The library's own error may come before the supervisor has noticed why.
            if self._handle.has_lost_parts(NOTICED_S):
                raise PartsLost(f"the trajectory queue has died: {error}") from error
            raise

    def _reader_of(self, rebuilds: int) -> QueueReader:
        with self._lock:
            if rebuilds > self._handle.rebuilds:
                timeouts = self._timeouts
                self._handle = await_rebuilt(self._handle, 3 * timeouts.rpc_s + timeouts.engine_start_s)
                self._reader.close()
                self._reader = self._attach(self._handle)
            if rebuilds != self._handle.rebuilds:
                raise PartsLost(f"queue {rebuilds} of the pool has ended; the present one is {self._handle.rebuilds}")
            return self._reader

    def _attach(self, handle: SupervisorHandle) -> QueueReader:
        return QueueReader.attach(
            handle.partition,
            namespace=handle.namespace,
            timeout_s=self._timeouts.rpc_s,
            check=handle.check_parts,
            who=f"trainer rank {os.environ.get('RANK', '0')}",
        )

    def close(self) -> None:
        """Close the connections to the queue; its rows stay."""
        self._reader.close()


@dataclass(frozen=True)
class PreparedBatch:
    """A batch that a step can train on.

    `plan`: of its samples, with their tags. `timings`: the controller's declared metrics of the batch. `rebuilds`: the
    number of the queue that has its rows. `rows`: this replica's trajectories by key. `samples`: on rank 0, those for
    samples.jsonl, with their reference answers. `share`: on leaders, a part of all rows, if batches are written to the
    disk. `files`: the image files of this replica's rows by hash.
    """

    step: int
    plan: StepPlan
    timings: dict[str, float]
    rebuilds: int
    rows: dict[str, Trajectory]
    samples: list[tuple[Trajectory, str | None]]
    share: list[Trajectory]
    files: dict[str, bytes] = field(default_factory=dict)


class BatchSource:
    """Gives each step its batch. Every method is collective over the trainer ranks, unless it says otherwise."""

    def __init__(self, config: Config, peers: ControlGroup, recorder: Recorder) -> None:
        self._config, self._peers, self._recorder = config, peers, recorder
        self._controller: PoolClient | None = None  # on rank 0
        self._pace = pace_of(config)
        self._channel = BatchChannel(config.timeouts)
        self._queue: QueueClient | None = None  # on leaders
        self._next: Future[PreparedBatch | PublicationNeeded] | None = None  # what a thread prepares
        self._prepares: tuple[int, int] | None = None  # its step and version

    def attach(self, handle: SupervisorHandle, controller: PoolClient | None) -> None:
        """Connect the leaders to the queue of the pool. `controller`: the connection to the pool, on rank 0."""
        self._controller = controller
        if parallel.is_leader():
            connect_ray(handle, self._config.timeouts.ray_start_s)
            self._queue = QueueClient(handle, self._config.timeouts)

    def take(self, step: int, version: int, *, asleep: bool = False) -> PreparedBatch | PublicationNeeded:
        """Return the batch of `step`, which updates the weights of `version`, or the need to publish these first.

        A publication is needed, and another call after it, if engines are `asleep` and would have to generate for the
        batch. If engines generate during training, this starts to prepare the next batch. Raises what the preparation
        raised; ranks that only waited for rank 0 raise PeerFailedError. With `telemetry.dump_batches` the batch is then
        in RUN_DIR/batches.
        """
        name = f"step {step + 1}/{self._config.run.steps}"
        if self._pace.overlaps:
            with self._recorder.phase("generate", f"{name}: generating"):
                prepared = self._from_thread(step, version)
        else:
            self._recorder.status(f"{name}: generating")
            self._channel.hurry()
            prepared = self._prepare(step, version, asleep=asleep)
        if not isinstance(prepared, PublicationNeeded):
            self._recorder.status(f"{name}: training")
            if self._config.telemetry.dump_batches:
                with self._recorder.phase("queue"):
                    self._dump(self._config.run_dir / "batches", prepared, prepared.share)
        return prepared

    def _from_thread(self, step: int, version: int) -> PreparedBatch | PublicationNeeded:
        began_early = self._next is not None
        prepared = self._await_next(step, version)
        if began_early and isinstance(prepared, PublicationNeeded):
            # The publication after the step before may have brought engines since that was found.
            prepared = self._await_next(step, version)
        if not isinstance(prepared, PublicationNeeded) and step + 1 < self._config.run.steps:
            self._start(step + 1, version + self._pace.updates_per_step)
        return prepared

    def _await_next(self, step: int, version: int) -> PreparedBatch | PublicationNeeded:
        """Return the result of preparing `step`, which begins now if it has not begun."""
        if self._next is None:
            self._start(step, version)
        assert self._next is not None and self._prepares == (step, version)
        self._channel.hurry()
        prepared = self._next.result()
        self._next = None
        return prepared

    def _start(self, step: int, version: int) -> None:
        self._channel.relax()
        self._prepares = (step, version)
        self._next = call_in_thread(self._prepare_early, step, version, name=f"prepare-batch-{step}")

    def _prepare_early(self, step: int, version: int) -> PreparedBatch | PublicationNeeded:
        with events.span("prepare_batch", step=step + 1):
            return self._prepare(step, version)

    def _phase(self, name: Phase) -> AbstractContextManager[None]:
        """Count the time of the block as a phase of the step, if the trainer waits for it."""
        return nullcontext() if self._pace.overlaps else self._recorder.phase(name)

    def _prepare(self, step: int, version: int, *, asleep: bool = False) -> PreparedBatch | PublicationNeeded:
        while True:
            with self._phase("generate"):
                ready = self._channel.wait(lambda bound_s: self._ask(step, bound_s, asleep), _READY)
            if isinstance(ready, str):
                return PublicationNeeded(ready)
            assert ready is not None  # `wait` goes on until there is a batch
            with self._phase("queue"):
                prepared = self._read(ready, version)
                kept = self._keep(ready, lost=prepared is None)
            if kept and prepared is not None:
                return prepared
            logger.warning("the queue died before the batch of step %d was read; taking the batch again", step)

    def _ask(self, step: int, bound_s: float, asleep: bool) -> BatchReady | str:
        """Ask the controller for a batch, on rank 0. A text is the reason why the weights must be published first."""
        assert self._controller is not None
        ready = self._controller.wait_batch(step, bound_s, asleep=asleep)
        return ready.reason if isinstance(ready, PublicationNeeded) else ready

    def _read(self, ready: BatchReady, version: int) -> PreparedBatch | None:
        """Plan a batch and read this rank's part of it; None if a rank has found that the queue died meanwhile.

        Raises DisagreementError if the replicas' plans differ.
        """
        started = time.perf_counter()
        tags = self._read_for_replica(ready.rebuilds, lambda queue: queue.read_tags(ready.keys), _TAGS)
        plan = None if tags is None else self._plan(ready, tags, version)
        hashes = set(self._channel.gather(LOST if plan is None else plan.hash))
        if plan is None or LOST in hashes:
            return None
        if len(hashes) != 1:
            raise DisagreementError(f"step {ready.step}: DP ranks planned differently: {sorted(hashes)}")
        keys = plan.keys_of(parallel.dp_rank())
        rows = self._read_for_replica(ready.rebuilds, lambda queue: queue.fetch(keys), ROWS)
        if rows is None:
            return None
        files: dict[str, bytes] | None = {}
        if any(row.images for row in rows):  # the same on every rank of the replica
            files = self._read_for_replica(ready.rebuilds, lambda queue: queue.fetch_images(rows), _FILES)
        if files is None:
            return None
        try:
            samples = self._read_samples(ready, plan)
            share = self._read_share(plan, ready.rebuilds) if self._config.telemetry.dump_batches else []
        except PartsLost:
            return None
        timings = {**ready.timings, "rollout/rebuilds": float(ready.rebuilds)}
        if self._pace.overlaps:
            timings["rollout/prefetch_seconds"] = time.perf_counter() - started
        own = {row.key: row for row in rows}
        return PreparedBatch(ready.step, plan, timings, ready.rebuilds, own, samples, share, files)

    def _plan(self, ready: BatchReady, tags: Sequence[SampleTag], version: int) -> StepPlan:
        replicas, replaced, reused = parallel.dp_size(), ready.replaced, ready.reused
        return plan_step(tags, self._config, dp_size=replicas, version=version, replaced=replaced, reused=reused)

    def _read_samples(self, ready: BatchReady, plan: StepPlan) -> list[tuple[Trajectory, str | None]]:
        """Return the trajectories that samples.jsonl shows, with their reference answers; [] but on rank 0.

        Not collective. Raises PartsLost if the queue has died.
        """
        if self._controller is None or self._queue is None:
            return []
        keys = self._recorder.sample_keys(ready.step, plan)
        rows = self._queue.read(ready.rebuilds, lambda queue: queue.fetch(keys))
        references = self._controller.references([row.group_id for row in rows]) if rows else {}
        return [(row, references.get(row.group_id)) for row in rows]

    def _read_share(self, plan: StepPlan, rebuilds: int) -> list[Trajectory]:
        """Return this leader's share of all rows, filtered groups included; [] on other ranks. Raises PartsLost.

        The rows have the files of all their images.
        """
        if self._queue is None:
            return []
        keys = list(plan.tags)[parallel.dp_rank() :: parallel.dp_size()]
        rows = self._queue.read(rebuilds, lambda queue: queue.fetch(keys))
        if not any(row.images for row in rows):
            return rows
        files = self._queue.read(rebuilds, lambda queue: queue.fetch_images(rows))
        return [replace(row, files={image.hash: files[image.hash] for image in row.images}) for row in rows]

    def _read_for_replica(self, rebuilds: int, question: Callable[[QueueReader], T], codec: Codec[T]) -> T | None:
        """Read the queue on the leader and return the result on every rank of its replica; None if the queue has died.

        `rebuilds` says which queue. Raises what `question` raised on the leader, and PeerFailedError on the other
        ranks of its replica.
        """
        own: T | None = None
        failure: Exception | None = None
        if self._queue is not None:
            try:
                own = self._queue.read(rebuilds, question)
            except Exception as error:
                failure = error
        text = None if failure is None else sendable(f"{type(failure).__name__}: {failure}")
        problem = self._channel.in_replica(LOST if isinstance(failure, PartsLost) else text, _PROBLEM)
        if problem == LOST:
            return None
        if failure is not None:
            raise failure
        if problem is not None:
            raise PeerFailedError(f"the first trainer rank of this replica could not read the queue: {problem}")
        return self._channel.in_replica(own, codec)

    def _keep(self, ready: BatchReady, *, lost: bool) -> bool:
        """Return on every rank whether all have read their part of the batch, which is then held until its commit.

        `lost`: this rank has not. Also False if the controller of the batch died meanwhile, because the new one does
        not know the batch. All ranks must drop such a batch and take it again.
        """
        if LOST in self._channel.gather(LOST if lost else ""):
            return False

        def keep(bound_s: float) -> bool:
            assert self._controller is not None
            return self._controller.keep(ready.step, ready.rebuilds)

        return bool(self._channel.wait(keep, _KEPT))

    @contextmanager
    def keep_on_failure(self, batch: PreparedBatch) -> Iterator[None]:
        """Write the batch to RUN_DIR/failed_batch, for `megarl replay`, if the block raises StepRefused.

        If a rank cannot write its share, the raised error says so.
        """
        try:
            yield
        except StepRefused as error:
            directory = self._config.run_dir / "failed_batch"
            problem: OSError | PartsLost | None = None
            try:
                self._dump(directory, batch, self._read_share(batch.plan, batch.rebuilds))
            except (OSError, PartsLost) as failure:  # a full disk, for example: the step may still be skipped
                logger.exception("the batch of step %d could not be kept", batch.step)
                problem = failure
            # All ranks get here. torchrun ends the others when the first one exits, so wait until all have written.
            incomplete = self._peers.any(problem is not None)
            message = (
                f"the batch could not be kept in {directory}: {problem or 'another rank failed to write its share'}"
            )
            message = message if incomplete else f"the batch is kept in {directory}"
            kept = type(error)(f"step {batch.step}: {error}; {message}")
            kept.updates = error.updates
            raise kept from error

    def _dump(self, directory: Path, batch: PreparedBatch, share: Sequence[Trajectory]) -> None:
        """Write a leader's share of the whole batch."""
        if self._queue is not None:
            rank, replicas = parallel.dp_rank(), parallel.dp_size()
            write_batch(directory, batch.step, batch.plan.version, share, part=rank, parts=replicas)

    def finish(self) -> None:
        """End a preparation that is running. Bounded by `timeouts.shutdown_s`; one that continues is logged."""
        if not self._end(self._config.timeouts.shutdown_s):
            waited = f"{self._config.timeouts.shutdown_s:.0f} s (timeouts.shutdown_s)"
            logger.warning("waited %s for the next batch's thread; leaving it to the end of the process", waited)

    def close(self) -> None:
        """End the preparation after a failure, and disconnect from the queue. Not collective: other ranks may not come.

        A rank whose thread follows rank 0's leaves the thread to the end of the process: waiting would delay its
        report.
        """
        try:
            self._end(2 * SLICE_S)
        finally:
            if self._queue is not None:
                self._queue.close()

    def _end(self, timeout_s: float) -> bool:
        """Close the channel and wait for the thread; return whether it has ended. Its failure is logged."""
        preparation, self._next = self._next, None
        if preparation is None:
            return True
        self._channel.close()
        if not wait([preparation], timeout_s).done:
            return False
        error = preparation.exception(0)
        if error is not None and not isinstance(error, ChannelClosed | PeerFailedError):
            logger.warning("the preparation of the next batch failed before it was ended: %r", error)
        return True
