"""The batches of the steps, each taken from the pool, planned, fetched and packed; if generation runs ahead, early.

The next batch is then prepared by a thread while the current one trains, and none after it. A batch that was prepared
and is not trained, because the run stops or fails, was never committed: the run that resumes uses its groups again or
draws them again.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

from megarl.common.errors import PartsLost
from megarl.common.process.threads import call_in_thread
from megarl.common.trust.object_collectives import TEXT
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.orchestrator.ready_batches import PublicationNeeded
from megarl.run.loop.pack_step import pack_step
from megarl.run.pool.batch_collectives import SLICE_S, BackgroundChannel, ChannelClosed
from megarl.run.pool.rollout_client import RolloutClient
from megarl.run.ranks.failure import PeerFailedError
from megarl.run.record.recorder import Recorder
from megarl.run.step.plan import StepBatch, StepPlan, plan_step
from megarl.telemetry.trace import events
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

    def __init__(self, config: Config, pool: RolloutClient, recorder: Recorder, packer: Packer) -> None:
        """`packer`: how the policy packs samples."""
        self._config, self._pool, self._recorder = config, pool, recorder
        self._packer = packer
        self._background = BackgroundChannel(config.timeouts) if pace_of(config).runs_ahead else None
        self._next: Future[PreparedBatch | PublicationNeeded] | None = None  # what a thread prepares
        self._prepares: tuple[int, int] | None = None  # its step and version

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
        assert self._next is not None and self._prepares == (step, version)
        channel.hurry()
        prepared = self._next.result()
        self._next = None
        return prepared

    def _start(self, channel: BackgroundChannel, step: int, version: int) -> None:
        channel.relax()
        self._prepares = (step, version)
        self._next = call_in_thread(self._prepare_next, step, version, channel, name=f"prepare-batch-{step}")

    def _prepare_next(self, step: int, version: int, channel: BackgroundChannel) -> PreparedBatch | PublicationNeeded:
        with events.span("prepare_batch", step=step + 1):
            return self._prepare(step, version, channel)

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
        if not self._end(self._config.timeouts.shutdown_s):
            waited = f"{self._config.timeouts.shutdown_s:.0f} s (timeouts.shutdown_s)"
            logger.warning("waited %s for the next batch's thread; it is left to the end of the process", waited)

    def close(self) -> None:
        """Do the same after a failure: not collective, because the other ranks may not come.

        A rank whose thread follows rank 0's leaves it to the end of the process rather than report its failure late.
        """
        self._end(2 * SLICE_S)

    def _end(self, timeout_s: float) -> bool:
        """Close the channel and wait for the thread; tell whether it has ended. Its failure is logged."""
        preparation, self._next = self._next, None
        if self._background is None or preparation is None:
            return True
        self._background.close()
        if not wait([preparation], timeout_s).done:
            return False
        error = preparation.exception(0)
        if error is not None and not isinstance(error, ChannelClosed | PeerFailedError):
            logger.warning("the preparation of the next batch failed before it was ended: %r", error)
        return True
