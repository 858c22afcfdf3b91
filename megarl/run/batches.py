"""The batches of the steps, each taken from the pool, planned, fetched and packed; if generation runs ahead, early.

The next batch is then prepared by a thread while the current one trains, and none after it. A batch that was prepared
and is not trained, because the run stops or fails, was never committed: the run that resumes uses its groups again or
draws them again.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.common.errors import PartsLost
from megarl.common.object_collectives import TEXT
from megarl.config.pace import pace_of
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.ready_batches import PublicationNeeded
from megarl.run.channel import SLICE_S, BackgroundChannel, ChannelClosed
from megarl.run.failure import PeerFailedError
from megarl.run.pack_step import pack_step
from megarl.run.pool_link import PoolLink
from megarl.run.recorder import Recorder
from megarl.run.step_batch import StepBatch
from megarl.run.step_plan import StepPlan, plan_step
from megarl.telemetry import events
from megarl.trainer import parallel
from megarl.trainer.packed_batch import PackedStep, Packer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedBatch:
    """A batch that a step can train on.

    `rows`: this replica's trajectories by key. `samples`: on rank 0, those that are shown in samples.jsonl, with their
    reference answers. `share`: on leaders, a part of all rows, if batches are written to the disk. `packed`: this
    replica's samples as the step's updates need them.
    """

    batch: StepBatch
    plan: StepPlan
    rows: dict[str, Trajectory]
    samples: list[tuple[Trajectory, str | None]]
    share: list[Trajectory] = field(default_factory=list)
    packed: PackedStep | None = None


class BatchSource:
    """Gives each step its batch. Every method is collective over the trainer ranks."""

    def __init__(self, config: Config, pool: PoolLink, recorder: Recorder, packer: Packer) -> None:
        """`packer`: how the policy packs samples."""
        self._config, self._pool, self._recorder = config, pool, recorder
        self._packer = packer
        self._background = BackgroundChannel(config.timeouts) if pace_of(config).runs_ahead else None
        self._next: _Preparation | None = None

    def take(self, step: int, version: int) -> PreparedBatch | PublicationNeeded:
        """Return the batch of `step`, which updates the weights of `version`.

        Or return that these must be published first; call it again then. If generation runs ahead, start to prepare
        the next one. Raises what the preparation raised, and on the ranks that only waited for rank 0 PeerFailedError.
        """
        name = f"step {step + 1}/{self._config.run.steps}"
        if self._background is None:
            prepared = self._prepare(step, version)
        else:
            prepared = self._from_thread(self._background, step, version, f"{name}: generating")
        if isinstance(prepared, PublicationNeeded):
            return prepared
        self._recorder.status(f"{name}: training")
        self._pool.record(prepared.batch, prepared.share)
        return prepared

    def _from_thread(
        self, channel: BackgroundChannel, step: int, version: int, status: str
    ) -> PreparedBatch | PublicationNeeded:
        with self._recorder.phase("generate", status):
            began_early = self._next is not None
            prepared = self._await_next(channel, step, version)
            if began_early and isinstance(prepared, PublicationNeeded):
                # The publication after the step before may have brought engines since that was found.
                prepared = self._await_next(channel, step, version)
        if isinstance(prepared, PublicationNeeded):
            return prepared
        if step + 1 < self._config.run.steps:
            self._start(channel, step + 1, version + pace_of(self._config).updates_per_step)
        return prepared

    def _await_next(self, channel: BackgroundChannel, step: int, version: int) -> PreparedBatch | PublicationNeeded:
        """Return what the preparation of `step` has found, which begins now if it has not yet."""
        if self._next is None:
            self._start(channel, step, version)
        assert self._next is not None and self._next.of == (step, version)
        channel.hurry()
        prepared = self._next.future.result()
        self._next = None
        return prepared

    def _start(self, channel: BackgroundChannel, step: int, version: int) -> None:
        channel.relax()
        self._next = _Preparation(self, channel, step, version)

    def _prepare(
        self, step: int, version: int, channel: BackgroundChannel | None = None
    ) -> PreparedBatch | PublicationNeeded:
        while True:
            batch = self._pool.take_batch(step, version, channel)
            if isinstance(batch, PublicationNeeded):
                return batch
            prepared = self._read(batch, channel)
            if self._pool.keep(batch, lost=prepared is None, channel=channel) and prepared is not None:
                return self._pack(prepared, channel)
            logger.warning("the queue has died before the batch of step %d was read; it is taken again", step)

    def _read(self, batch: StepBatch, channel: BackgroundChannel | None) -> PreparedBatch | None:
        """Plan a batch and read what this rank needs of it; None if the queue has died meanwhile."""
        started = time.perf_counter()
        plan = plan_step(
            batch.tags,
            self._config,
            dp_size=parallel.dp_size(),
            version=batch.version,
            replaced=batch.replaced,
            reused=batch.reused,
        )
        try:
            rows = self._pool.fetch(batch, plan, channel)
            samples, share = self._pool.read_samples(batch), self._pool.read_whole(batch)
        except PartsLost:
            return None
        if channel is not None:
            batch.timings["rollout/prefetch_seconds"] = time.perf_counter() - started
        return PreparedBatch(batch, plan, rows, samples, share=share)

    def _pack(self, prepared: PreparedBatch, channel: BackgroundChannel | None) -> PreparedBatch:
        """Return the batch with this replica's samples packed for its updates. Collective: every rank has read it."""
        started = time.perf_counter()
        gather = channel.of_replicas if channel else partial(parallel.dp_all_gather_object, codec=TEXT)
        with nullcontext() if channel else self._recorder.phase("update"):
            packed = pack_step(
                self._packer, prepared.plan, prepared.rows, self._config, replica=parallel.dp_rank(), gather=gather
            )
        if channel is not None:
            prepared.batch.timings["rollout/prefetch_seconds"] += time.perf_counter() - started
        return replace(prepared, packed=packed)

    def finish(self) -> None:
        """End a preparation that is running. Bounded by `timeouts.shutdown_s`; one that goes on is logged."""
        if (thread := self._end(self._config.timeouts.shutdown_s)) is not None:
            waited = f"{self._config.timeouts.shutdown_s:.0f} s (timeouts.shutdown_s)"
            logger.warning("waited %s for %s to end; it is left to the end of the process", waited, thread.name)

    def close(self) -> None:
        """Do the same after a failure: not collective, because the other ranks may not come.

        A rank whose thread follows rank 0's leaves it to the end of the process rather than report its failure late.
        """
        self._end(2 * SLICE_S)

    def _end(self, timeout_s: float) -> threading.Thread | None:
        """Close the channel and wait for the thread; return it if it has not ended. Its failure is logged."""
        preparation, self._next = self._next, None
        if self._background is None or preparation is None:
            return None
        self._background.close()
        preparation.thread.join(timeout_s)
        if preparation.thread.is_alive():
            return preparation.thread
        error = preparation.future.exception()
        if error is not None and not isinstance(error, ChannelClosed | PeerFailedError):
            logger.warning("%s failed before it was ended: %r", preparation.thread.name, error)
        return None


class _Preparation:
    """The preparation of one batch in a daemon thread; `future` gets the batch or the exception."""

    def __init__(self, source: BatchSource, channel: BackgroundChannel, step: int, version: int) -> None:
        self.of = (step, version)
        self.future: Future[PreparedBatch | PublicationNeeded] = Future()
        self.thread = threading.Thread(
            target=self._run, args=(source, channel), name=f"prepare-batch-{step}", daemon=True
        )
        self.thread.start()

    def _run(self, source: BatchSource, channel: BackgroundChannel) -> None:
        step = self.of[0] + 1
        try:
            with events.span("prepare_batch", step=step):
                prepared = source._prepare(*self.of, channel)
            self.future.set_result(prepared)
        except BaseException as error:
            self.future.set_exception(error)
