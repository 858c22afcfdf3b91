"""Uses the time in which the trainer waits for a batch: log-prob passes over the groups of it that have finished.

The main thread does this, over its own communicators, between the end of one step and the beginning of the next. So
the weights are those of the step, and no collective of an update can meet one of these passes. Meanwhile the thread
that prepares the batch waits over process groups of its own (`batches.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megarl.common.errors import PartsLost
from megarl.common.object_collectives import Codec, codec_of
from megarl.config.datasets import own_temperatures
from megarl.config.old_logprobs import logprob_passes, teacher_passes
from megarl.config.schema import Config
from megarl.queue.streams import REFERENCE_LOGPROBS
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.run.channel import SLICE_S
from megarl.run.early_logprobs import EarlyLedger, EarlyLogprobs, Portion, packed, size_of, unpacked
from megarl.run.failure import PeerFailedError
from megarl.run.peers import Peers
from megarl.run.pool_link import PoolLink
from megarl.run.recorder import Recorder
from megarl.run.step_batch import StepBatch
from megarl.run.step_plan import StepPlan, plan_step
from megarl.telemetry import events
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy

logger = logging.getLogger(__name__)

# Between two questions for groups that have finished. The end of the wait itself is noticed at once.
POLL_S = 0.1


@dataclass(frozen=True)
class _Found:
    """The answer of rank 0 to all ranks: the groups that the batch would have now, and the tags of new ones.

    `rebuilds`: how often the pool had started another queue before the one that has them.
    """

    groups: list[int]
    tags: list[SampleTag]
    rebuilds: int


_FOUND: Codec[_Found | None] = codec_of(_Found | None)


class IdleLogprobs:
    """Computes log-probs early and hands them to the replicas that train the samples. Collective over all ranks."""

    def __init__(self, config: Config, policy: Policy, peers: Peers, pool: PoolLink, recorder: Recorder) -> None:
        self._config, self._policy, self._peers = config, policy, peers
        self._pool, self._recorder = pool, recorder
        self._teachers = {each.name: each for each in teacher_passes(config)}
        only = {name: each.datasets for name, each in self._teachers.items()}
        self._ledger = EarlyLedger([*logprob_passes(config), *self._teachers], only)
        self._values: dict[str, dict[str, Tensor]] = {stream: {} for stream in self._ledger.streams}
        self._wanted: list[SampleTag] = []  # of the upcoming groups, the samples that the step would train
        self._temperatures = own_temperatures(config)
        self._uploads = policy.uploads_reference
        self._seconds = 0.0
        self._step = 0  # steps before the one whose log-probs are computed

    def work_until(self, ready: Future[Any], step: int, version: int) -> None:
        """Compute log-probs of the groups that `step` will train, until `ready` is done on rank 0.

        `version`: that of the policy's weights now, which the step updates. The batch waits for one portion at most.
        Returns early on a rank whose own `ready` has failed for a reason that rank 0 does not know.
        """
        self._ledger.begin(version, self._policy.reference_step)
        self._wanted, self._step = [], step
        while not _failed_here(ready):
            found = self._peers.on_first_rank(lambda: self._look(ready, step), _FOUND)
            if found is None:
                return
            if found.rebuilds != self._ledger.rebuilds:
                self._forget(found.rebuilds)
            if found.groups != self._ledger.upcoming:
                self._wanted = self._trainable(self._ledger.note_upcoming(found.groups, found.tags))
            portion = self._next_portion()
            if portion is not None:
                self._compute(portion)

    def _look(self, ready: Future[Any], step: int) -> _Found | None:
        """Wait until there is work, the batch is ready (None), or `SLICE_S` is over; the other ranks wait meanwhile."""
        until = time.monotonic() + SLICE_S
        ledger = self._ledger
        while not ready.done():
            keys, rebuilds = self._pool.upcoming(step)
            groups, same = list(keys), rebuilds == ledger.rebuilds
            if not same or groups != ledger.upcoming or self._next_portion() is not None or time.monotonic() > until:
                asked = [key for group in (ledger.unknown(groups) if same else groups) for key in keys[group]]
                try:
                    return _Found(groups, self._pool.tags_of(asked, rebuilds), rebuilds)
                except PartsLost:  # the thread that waits for the batch brings the new queue
                    wait([ready], timeout=POLL_S)
                    return _Found([], [], ledger.rebuilds)
            wait([ready], timeout=POLL_S)
        return None

    def _forget(self, rebuilds: int) -> None:
        """Forget what was computed of samples of a queue that has died; `rebuilds` tells which one comes next."""
        self._ledger.forget(rebuilds)
        self._wanted, self._values = [], {stream: {} for stream in self._ledger.streams}

    def _trainable(self, tags: Sequence[SampleTag]) -> list[SampleTag]:
        """Return those samples that the step would train: not failed, not too old, of groups with signal."""
        plan = plan_step(tags, self._config, dp_size=1, version=self._ledger.version)
        return [plan.tags[key] for key in plan.keys_of(0)]

    def _next_portion(self) -> Portion | None:
        """Return about one micro-batch for each replica and pipeline stage: less would leave stages idle.

        Each pass brings an offloaded reference model to the device, so it is not made for a few samples.
        """
        replicas = parallel.dp_size()
        limit = self._config.trainer.token_limit * self._config.trainer.parallel.pipeline * replicas
        return self._ledger.next_portion(self._wanted, replicas, limit, least=limit // 2 if self._uploads else 0)

    def _compute(self, portion: Portion) -> None:
        """Fetch the samples of a portion and compute their log-probs, each replica those of its part."""
        mine = parallel.dp_rank()
        rows: list[Trajectory] | None = None
        try:
            rows = self._pool.rows_of(portion.parts[mine], self._ledger.rebuilds)
        except PartsLost:
            logger.warning("the queue has died: log-probs that were computed early of its samples are dropped")
        if self._peers.any(rows is None) or rows is None:
            self._forget(self._ledger.rebuilds)
            return
        samples = {row.key: TrainSample.of(row, temperature=self._temperatures.get(row.dataset)) for row in rows}
        started = time.perf_counter()
        step = self._step + 1
        with self._recorder.phase("logprobs"), events.span("idle_logprobs", step=step):
            for stream in filter(portion.needs, self._ledger.streams):
                part = [samples[key] for key in portion.part(stream, mine)]
                teacher = self._teachers[stream].teacher if stream in self._teachers else ""
                results = self._policy.compute_logprobs(part, reference=stream == REFERENCE_LOGPROBS, teacher=teacher)
                for sample, result in zip(part, results, strict=True):
                    self._values[stream][sample.key] = result.logprobs_R
        self._seconds += time.perf_counter() - started
        self._ledger.note_computed(portion)

    def collect(self, batch: StepBatch, plan: StepPlan) -> EarlyLogprobs:
        """Return what was computed early of the samples that this replica trains, and note how much it was.

        Raises ValueError if the plan is for other weights, or if log-probs are not those of their sample.
        """
        if plan.version != self._ledger.version:
            raise ValueError(f"log-probs of version {self._ledger.version} were computed for one of {plan.version}")
        if batch.rebuilds != self._ledger.rebuilds:  # they are those of other samples
            self._forget(batch.rebuilds)
        owners = {key: replica for replica in range(parallel.dp_size()) for key in plan.keys_of(replica)}
        concerned = {
            stream: [key for key in owners if self._ledger.concerns(stream, plan.tags[key])]
            for stream in self._ledger.streams
        }
        held = {stream: self._ledger.held(stream, keys) for stream, keys in concerned.items()}
        with self._recorder.phase("logprobs"):
            values = self._exchange(owners, plan) if any(held.values()) else {}
        batch.timings.update(self._metrics(held, concerned, plan))
        groups = {tag.group_id for tag in batch.tags}
        kept = set(self._ledger.settle(groups))
        self._values = {
            stream: {key: value for key, value in own.items() if (stream, key) in kept}
            for stream, own in self._values.items()
        }
        complete = frozenset(stream for stream, keys in concerned.items() if len(held[stream]) == len(keys))
        return EarlyLogprobs(values, complete)

    def _exchange(self, owners: dict[str, int], plan: StepPlan) -> dict[str, dict[str, Tensor]]:
        """Send each sample's log-probs to the replica that trains it; return those of this one."""
        version, mine = plan.version, parallel.dp_rank()
        lengths = {key: plan.tags[key].response_tokens for key in owners}
        messages = self._ledger.messages(owners, lengths, parallel.dp_size())
        parts = [packed(entries, self._values, version) for entries in messages[mine]]
        incoming = [sender[mine] for sender in messages]
        received = parallel.dp_exchange(parts, [size_of(entries) for entries in incoming])
        found: dict[str, dict[str, Tensor]] = {}
        for entries, message in zip(incoming, received, strict=True):
            for (stream, key), values_R in unpacked(entries, message, version).items():
                found.setdefault(stream, {})[key] = values_R
        return found

    def _metrics(self, held: dict[str, list[str]], concerned: dict[str, list[str]], plan: StepPlan) -> dict[str, float]:
        """Return the share of samples and of tokens, over all passes that the step needs, and the seconds."""
        seconds, self._seconds = self._seconds, 0.0
        result = {"seconds": seconds}
        needed = [key for keys in concerned.values() for key in keys]
        if needed:
            early = [key for keys in held.values() for key in keys]
            tokens = {key: plan.tags[key].total_tokens for key in needed}
            result["samples_share"] = len(early) / len(needed)
            result["tokens_share"] = sum(tokens[key] for key in early) / sum(tokens[key] for key in needed)
        return {f"perf/idle_logprobs_{name}": value for name, value in result.items()}


def _failed_here(ready: Future[Any]) -> bool:
    """Tell whether this rank's own preparation has failed, and not because it follows another rank that has.

    What rank 0 has failed with, rank 0 raises itself: it would lose its own message if a rank left it in a collective.
    """
    return ready.done() and not isinstance(ready.exception(), PeerFailedError | None)
