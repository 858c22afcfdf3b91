"""The connection of all trainer ranks to the rollout pool and its queue.

Only rank 0 calls the rollout controller, and the first rank of each data-parallel replica (its leader) reads the
queue; both broadcast what they get. Every public method is collective over the trainer ranks unless it says otherwise.
A thread beside the training thread may call those that take a `channel`, with one of its own (`BackgroundChannel`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from megarl.cluster.client.connection import connect_ray
from megarl.cluster.client.pool_client import PoolClient
from megarl.cluster.pool.pool_process import SupervisorHandle
from megarl.common.clocks import GRACE_S
from megarl.common.errors import PartsLost
from megarl.common.trust.object_collectives import TEXT, Codec, codec_of, sendable
from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.queue.dump import write_batch
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.queue.transfer import QueueReader
from megarl.rollout.admission.counters import Counters
from megarl.rollout.engine.placement import HeldDevices, own_device, refuse_overlap
from megarl.rollout.orchestrator.evaluator import FinishedEvaluation
from megarl.rollout.orchestrator.ready_batches import BatchReady, PublicationNeeded
from megarl.run.pool.batch_collectives import Channel, MainChannel
from megarl.run.pool.queue_client import QueueClient
from megarl.run.pool.row_codec import ROWS
from megarl.run.ranks.control_group import ControlGroup
from megarl.run.ranks.failure import PeerFailedError
from megarl.run.record.recorder import Recorder
from megarl.run.step.plan import StepBatch, StepPlan
from megarl.trainer import parallel
from megarl.trainer.policy import StepRefused
from megarl.weights.group.protocols import EngineHandles

logger = logging.getLogger(__name__)
H = TypeVar("H")
T = TypeVar("T")


_CONNECTED: Codec[tuple[SupervisorHandle, list[HeldDevices]]] = codec_of(tuple[SupervisorHandle, list[HeldDevices]])
_DEVICES: Codec[HeldDevices] = codec_of(HeldDevices)
# A text is the reason of a PublicationNeeded: a message has one kind of dataclass.
_READY: Codec[BatchReady | str | None] = codec_of(BatchReady | str | None)
_TAGS: Codec[list[SampleTag]] = codec_of(list[SampleTag])
_REPORTS: Codec[list[SetReport] | str | None] = codec_of(list[SetReport] | str | None)
_EVALUATIONS: Codec[list[FinishedEvaluation] | str] = codec_of(list[FinishedEvaluation] | str)
_KEPT: Codec[bool | None] = codec_of(bool | None)
_NOTHING: Codec[None] = codec_of(None)
_PROBLEM: Codec[str | None] = codec_of(str | None)


LOST = "lost"  # what a leader says of the queue, if it has died


class _Held(Generic[H]):
    """Something that only some ranks hold: `use` calls a function with it there, and returns None elsewhere."""

    def __init__(self) -> None:
        self._it: H | None = None

    def hold(self, it: H) -> H:
        self._it = it
        return it

    @property
    def is_here(self) -> bool:
        return self._it is not None

    def use(self, function: Callable[[H], T]) -> T | None:
        return None if self._it is None else function(self._it)


class DisagreementError(RuntimeError):
    """Ranks computed different plans from the same tags. This is a bug; the batch must not be trained on."""


class RolloutClient:
    """Talks to the pool once `attach` has connected it. As a `Stateful` part it keeps the committed rollout history."""

    key = "rollout"

    def __init__(self, config: Config, peers: ControlGroup, recorder: Recorder) -> None:
        self._config, self._peers, self._recorder = config, peers, recorder
        self._main = MainChannel(peers, recorder)
        self._client: _Held[PoolClient] = _Held()  # on rank 0
        self._queue: _Held[QueueClient] = _Held()  # on leaders
        self._history: dict[str, Any] | None = None
        self._saved: int | None = None

    def attach(self, launch: Future[SupervisorHandle] | None) -> None:
        """Wait for the pool, make it resume this run's history, and connect the leaders to the queue.

        `launch`: the supervisor that is being started, on rank 0 only. Raises RolloutError if an engine and a rank
        hold the same GPU.
        """
        timeouts = self._config.timeouts

        def connect() -> tuple[SupervisorHandle, list[HeldDevices]]:
            assert launch is not None
            handle = launch.result(timeout=timeouts.ray_start_s + timeouts.node_s + GRACE_S / 2)
            self._recorder.load_tokenizer()  # while the engines start
            client = self._client.hold(PoolClient.connect(handle, self._config, self._recorder.say))
            client.begin(self._history)
            return client.handle, client.devices()

        handle, held = self._peers.on_first_rank(connect, _CONNECTED)
        refuse_overlap(self._peers.gather(own_device(self._peers.rank), _DEVICES), held)
        if parallel.is_leader():
            connect_ray(handle, timeouts.ray_start_s)
            self._queue.hold(QueueClient(handle, timeouts))

    def engine_handles(self) -> EngineHandles | None:
        """Return the handles that the weight sync calls the engines by, on rank 0; None elsewhere. Not collective."""
        return self._client.use(lambda pool: pool.engine_handles())

    def drain(self) -> None:
        """Wait until all running responses have ended; what has not begun is held back until `set_version`."""
        self._ask(lambda pool: pool.drain(), _NOTHING)

    def announce(self, version: int) -> None:
        """Tell the controller that engines are about to be given `version`. Not collective: only rank 0 acts."""
        self._client.use(lambda pool: pool.announce(version))

    def set_version(self, version: int) -> None:
        """Tell the controller that every engine serves `version`. Not collective: only rank 0 acts.

        If generation runs ahead, it then starts the groups that the version allows.
        """
        ahead = pace_of(self._config).runs_ahead
        self._client.use(lambda pool: pool.set_version(version, admit=ahead))

    def admit(self, needed: int) -> None:
        """Start every group that the published version allows. Not collective: only rank 0 acts.

        `needed`: the step whose batch the trainer takes next, and has nothing else to do.
        """
        self._client.use(lambda pool: pool.admit(needed))

    def take_batch(self, step: int, version: int, channel: Channel | None = None) -> StepBatch | PublicationNeeded:
        """Wait for the groups of `step`, which updates the weights of `version`; return keys and tags on every rank.

        Or on every rank that the weights must be published first, because no replica is left.
        """
        via = channel or self._main
        while True:
            with via.phase("generate", f"step {step + 1}/{self._config.run.steps}: generating"):
                ready = via.wait(lambda bound_s: self._wait_batch(step, bound_s), _READY)
            if isinstance(ready, str):
                return PublicationNeeded(ready)
            with via.phase("queue"):
                tags = self._tags(via, ready)
                if any(via.of_replicas(LOST if tags is None else "")) or tags is None:
                    continue
            timings = {**ready.timings, "rollout/rebuilds": ready.rebuilds}
            return StepBatch(
                step, version, ready.keys, tags, timings, ready.replaced, ready.reused, rebuilds=ready.rebuilds
            )

    def _tags(self, via: Channel, ready: BatchReady) -> list[SampleTag] | None:
        """Return the tags of a batch on every rank of the replica; None if the queue was lost meanwhile."""
        try:
            return self._read(via, ready.rebuilds, lambda queue: queue.read_tags(ready.keys), _TAGS)
        except PartsLost:
            return None

    def _wait_batch(self, step: int, bound_s: float | None) -> BatchReady | str:
        ready = self._client.use(lambda client: client.wait_batch(step, bound_s))
        return ready.reason if isinstance(ready, PublicationNeeded) else cast(BatchReady, ready)

    def fetch(self, batch: StepBatch, plan: StepPlan, channel: Channel | None = None) -> dict[str, Trajectory]:
        """Return this replica's rows by key.

        Raises DisagreementError if the replicas' plans differ, and PartsLost on all ranks of a replica that has lost
        the queue; call `keep` in any case.
        """
        via = channel or self._main
        with via.phase("queue"):
            hashes = set(via.of_replicas(plan.hash))
            if len(hashes) != 1:
                raise DisagreementError(f"step {batch.step}: DP ranks planned differently: {sorted(hashes)}")
            keys = plan.keys_of(parallel.dp_rank())
            rows = self._read(via, batch.rebuilds, lambda queue: queue.fetch(keys), ROWS)
            return {row.key: row for row in rows}

    def keep(self, batch: StepBatch, *, lost: bool, channel: Channel | None = None) -> bool:
        """Tell on every rank whether all have read what they need of the batch, which is then held until its commit.

        `lost`: this rank has not. False also if the controller that gave the batch has died meanwhile: the new one does
        not know of it. Such a batch must be dropped by all ranks, and taken again.
        """
        via = channel or self._main
        if any(via.of_replicas(via.in_replica(LOST if lost else "", TEXT))):
            return False
        return via.wait(
            lambda bound_s: bool(self._client.use(lambda pool: pool.keep(batch.step, batch.rebuilds))), _KEPT
        )

    def read_whole(self, batch: StepBatch) -> list[Trajectory]:
        """Return this leader's share of all rows of the batch for `record`; [] unless that writes them.

        Not collective; [] but on leaders. Raises PartsLost if the queue has died.
        """
        return self._share(batch) or [] if self._config.telemetry.dump_batches else []

    def record(self, batch: StepBatch, share: Sequence[Trajectory]) -> None:
        """Write the batch, which is about to be trained, to RUN_DIR/batches if `telemetry.dump_batches` is set."""
        if self._config.telemetry.dump_batches and self._queue.is_here:
            with self._recorder.phase("queue"):
                self._dump(self._config.run_dir / "batches", batch, share)

    @contextmanager
    def keep_batch_on_failure(self, batch: StepBatch) -> Iterator[None]:
        """Write the batch to RUN_DIR/failed_batch, for `megarl replay`, if the block raises StepRefused.

        If a rank cannot write its share, the error says so, and is raised all the same.
        """
        try:
            yield
        except StepRefused as error:
            directory = self._config.run_dir / "failed_batch"
            problem: OSError | PartsLost | None = None
            try:
                if (share := self._share(batch)) is not None:
                    self._dump(directory, batch, share)
            except (OSError, PartsLost) as failure:  # a full disk, for example: the step may still be skipped
                logger.exception("the batch of step %d could not be kept", batch.step)
                problem = failure
            # All ranks get here. torchrun ends the others when the first one exits, so wait until all have written.
            incomplete = self._peers.any(problem is not None)
            told = f"the batch could not be kept in {directory}: {problem or 'another rank failed to write its share'}"
            told = told if incomplete else f"the batch is kept in {directory}"
            kept = type(error)(f"step {batch.step}: {error}; {told}")
            kept.updates = error.updates
            raise kept from error

    def quarantine(self, replica: int, reason: str) -> bool:
        """Take a replica out until the next publication has replaced it, and tell the user; False if that cannot be.

        Not collective: only rank 0 acts, and True elsewhere.
        """
        told = self._client.use(lambda pool: pool.quarantine(replica, reason))
        if told is not None:
            self._recorder.say(f"{reason}; {told[1]}")
        return told is None or told[0]

    def commit(self, batch: StepBatch, plan: StepPlan) -> Counters | None:
        """Tell the controller how every group ended; it then frees the rows that it does not use again.

        Return what the controller has counted since the start of the history. Not collective: only rank 0 acts, and
        None elsewhere.
        """
        outcome = plan.outcome
        return self._client.use(
            lambda pool: pool.commit(
                batch.step,
                trained=outcome.trained,
                filtered=outcome.filtered,
                dropped_stale=outcome.dropped_stale,
                failed=outcome.failed,
                reused=outcome.reused,
                ended=plan.ended,
            )
        )

    def read_samples(self, batch: StepBatch) -> list[tuple[Trajectory, str | None]]:
        """Return the trajectories that are shown in samples.jsonl, with their reference answers; [] but on rank 0.

        Not collective. Call it before `commit`, which frees the rows. Raises PartsLost if the queue has died.
        """

        def read(pool: PoolClient) -> list[tuple[Trajectory, str | None]]:
            keys = self._recorder.sample_keys(batch)
            rows = self._queue.use(lambda queue: queue.read(batch.rebuilds, lambda reader: reader.fetch(keys))) or []
            references = pool.references([row.group_id for row in rows]) if rows else {}
            return [(row, references.get(row.group_id)) for row in rows]

        return self._client.use(read) or []

    def evaluate(
        self, version: int, label: str, stopped: Callable[[], bool]
    ) -> list[SetReport] | PublicationNeeded | None:
        """Evaluate all sets on the pool; responses go to RUN_DIR/eval_{label}.jsonl.

        Returns None on every rank if `stopped()` becomes true on rank 0 meanwhile.
        """

        def ask(pool: PoolClient) -> list[SetReport] | str | None:
            reports = pool.evaluate_unless(stopped, version, label)
            return reports.reason if isinstance(reports, PublicationNeeded) else reports

        answer = self._ask(ask, _REPORTS)
        return PublicationNeeded(answer) if isinstance(answer, str) else answer

    def start_evaluation(self, version: int, label: str) -> None:
        """Begin to evaluate all sets beside training. Not collective: only rank 0 acts."""
        self._client.use(lambda pool: pool.start_evaluation(version, label))

    def take_evaluations(self) -> list[FinishedEvaluation]:
        """Return the evaluations that have finished since the last call, on rank 0; [] elsewhere. Not collective."""
        finished = self._client.use(lambda pool: pool.take_evaluations()) or []
        assert not isinstance(finished, PublicationNeeded)  # only a trainer that waits is told that
        return finished

    def finish_evaluations(self) -> list[FinishedEvaluation] | PublicationNeeded:
        """Wait for the evaluation that runs beside training, if there is one, and return what has finished.

        Or on every rank that the weights must be published first, because no replica is left.
        """

        def ask(pool: PoolClient) -> list[FinishedEvaluation] | str:
            finished = pool.take_evaluations(wait_s=self._config.timeouts.generate_s)
            return finished.reason if isinstance(finished, PublicationNeeded) else finished

        answer = self._ask(ask, _EVALUATIONS)
        return PublicationNeeded(answer) if isinstance(answer, str) else answer

    def state_dict(self) -> dict[str, Any]:
        """Return the rollout side's committed history as JSON content. On rank 0."""
        return self._client.use(lambda pool: pool.state_dict()) or {}

    def saved(self, step: int) -> None:
        """Tell the controller that the checkpoint of `step` steps is complete. Not collective: only rank 0 acts."""
        if step != self._saved:
            self._client.use(lambda pool: pool.saved(step))
            self._saved = step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the history that `attach` makes the pool resume."""
        self._history = state

    def close(self, *, keep_pool: bool) -> None:
        """Disconnect from the queue and end the pool (unless kept); bounded, and safe after a failure."""
        try:
            self._queue.use(lambda queue: queue.close())
        finally:
            if not keep_pool:
                self._client.use(lambda pool: pool.close())

    def _ask(self, question: Callable[[PoolClient], T], codec: Codec[T]) -> T:
        """Call the controller on rank 0 and return its answer on every rank."""
        return self._peers.on_first_rank(lambda: cast(T, self._client.use(question)), codec)

    def _read(self, via: Channel, rebuilds: int, question: Callable[[QueueReader], T], codec: Codec[T]) -> T:
        """Read the queue on the leader and return the result on every rank of its replica.

        `rebuilds` tells which queue. Raises PartsLost on all ranks of the replica if that one has died; else what
        `question` raised on the leader, and PeerFailedError on the other ranks of its replica.
        """
        own: T | None = None
        failure: Exception | None = None
        try:
            own = self._queue.use(lambda queue: queue.read(rebuilds, question))
        except Exception as error:
            failure = error
        text = None if failure is None else sendable(f"{type(failure).__name__}: {failure}")
        problem = via.in_replica(LOST if isinstance(failure, PartsLost) else text, _PROBLEM)
        if problem == LOST:
            raise PartsLost("the queue has died") from failure
        if failure is not None:
            raise failure
        if problem is not None:
            raise PeerFailedError(f"the first trainer rank of this replica could not read the queue: {problem}")
        return via.in_replica(own, codec)

    def _share(self, batch: StepBatch) -> list[Trajectory] | None:
        """Read this leader's share of all rows of a batch; None on other ranks. Raises PartsLost."""
        keys = batch.keys[parallel.dp_rank() :: parallel.dp_size()]
        return self._queue.use(lambda queue: queue.read(batch.rebuilds, lambda reader: reader.fetch(keys)))

    def _dump(self, directory: Path, batch: StepBatch, share: Sequence[Trajectory]) -> None:
        """Write a leader's share of the whole batch, filtered groups included."""
        rank, replicas = parallel.dp_rank(), parallel.dp_size()
        write_batch(directory, batch.step, batch.version, share, part=rank, parts=replicas)
