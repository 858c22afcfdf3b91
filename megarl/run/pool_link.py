"""The rollout pool and its queue as all trainer ranks see them.

Rank 0 alone talks to the rollout controller; the first rank of each data-parallel replica (a leader) reads the queue;
what they learn is broadcast. Every public method is collective over the trainer ranks unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from megarl.cluster.client import PoolClient, connect_ray
from megarl.cluster.handle import SupervisorHandle
from megarl.common.timeouts import GRACE_S
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.queue.dump import write_batch
from megarl.queue.trajectory import Trajectory
from megarl.queue.transfer import QueueReader
from megarl.rollout.devices import own_device, refuse_overlap
from megarl.run.peers import Peers
from megarl.run.recorder import Recorder
from megarl.run.step import StepPlan
from megarl.run.step_batch import StepBatch
from megarl.trainer import parallel
from megarl.trainer.policy import NonFiniteError
from megarl.weights.handles import EngineHandles

T = TypeVar("T")


class DisagreementError(RuntimeError):
    """Ranks computed different plans from the same tags: a bug, and nothing may be trained on it."""


class PoolLink:
    """Connected by `attach`; a part of the run's checkpoints by the rollout side's committed history."""

    key = "rollout"

    def __init__(self, config: Config, peers: Peers, recorder: Recorder) -> None:
        self._config, self._peers, self._recorder = config, peers, recorder
        self._client: PoolClient | None = None  # on rank 0
        self._reader: QueueReader | None = None  # on leaders
        self._history: dict[str, Any] | None = None

    def attach(self, launch: Future[SupervisorHandle] | None) -> None:
        """Wait for the pool, have it begin from this run's history, and connect the leaders to the queue.

        `launch`: the supervisor being started, on rank 0 only. ValueError if an engine and a rank hold the same GPU.
        """
        timeouts = self._config.timeouts

        def connect() -> tuple[SupervisorHandle, list[Any]]:
            assert launch is not None
            handle = launch.result(timeout=timeouts.ray_start_s + timeouts.node_s + GRACE_S / 2)
            self._client = PoolClient.connect(handle, self._config)
            self._client.begin(self._history)
            return handle, self._client.devices()

        handle, held = self._peers.on_first_rank(connect)
        refuse_overlap(self._peers.gather(own_device(self._peers.rank)), held)
        if parallel.is_leader():
            connect_ray(handle, timeouts.ray_start_s)
            self._reader = QueueReader.attach(handle.partition, namespace=handle.namespace, timeout_s=timeouts.queue_s)

    def engine_handles(self) -> EngineHandles | None:
        """The engines for the weight sync, on rank 0; None elsewhere. Not collective."""
        return self._client.engine_handles() if self._client is not None else None

    def set_version(self, version: int) -> None:
        """Every engine serves `version` from here on. No rank waits for another."""
        self._tell(lambda pool: pool.set_version(version, admit=False))

    def admit(self) -> None:
        """Start every group that the published version allows. No rank waits for another."""
        self._tell(lambda pool: pool.admit())

    def take_batch(self, step: int, version: int) -> StepBatch:
        """The finished groups of `step`, which updates the weights of `version`; every rank knows their tags."""
        name = f"step {step + 1}/{self._config.run.steps}"
        with self._recorder.phase("generate", f"{name}: generating"):
            ready = self._ask(lambda pool: pool.wait_batch(step))
        with self._recorder.phase("queue"):
            tags = self._read(lambda queue: queue.read_tags(ready.keys))
        self._recorder.status(f"{name}: training")
        return StepBatch(step, version, ready.keys, tags, ready.timings)

    def fetch(self, batch: StepBatch, plan: StepPlan) -> dict[str, Trajectory]:
        """This replica's rows by key. Raises DisagreementError if the replicas do not share one plan."""
        with self._recorder.phase("queue"):
            hashes = set(parallel.dp_all_gather_object(plan.hash))
            if len(hashes) != 1:
                raise DisagreementError(f"step {batch.step}: DP ranks planned differently: {sorted(hashes)}")
            rows = self._read(lambda queue: queue.fetch(plan.keys_of(parallel.dp_rank())))
            if self._config.telemetry.dump_batches:
                self._dump(self._config.run_dir / "batches", batch)
            return {row.key: row for row in rows}

    @contextmanager
    def keep_batch_on_failure(self, batch: StepBatch) -> Iterator[None]:
        """A loss or gradient that is not finite stops the run; the batch that did it is kept for `megarl replay`."""
        try:
            yield
        except NonFiniteError as error:
            directory = self._config.run_dir / "failed_batch"
            self._dump(directory, batch)
            # All ranks raise it. The first one to end has torchrun end the others: not before their part is written.
            self._peers.barrier()
            raise NonFiniteError(f"step {batch.step}: {error}; the batch is kept in {directory}") from error

    def commit(self, batch: StepBatch, plan: StepPlan) -> None:
        """Tell the controller what became of every group; it frees the rows. No rank waits for another."""
        outcome = plan.outcome
        self._write_samples(batch)  # while the rows are still in the queue
        self._tell(
            lambda pool: pool.commit(
                batch.step,
                trained=outcome.trained,
                filtered=outcome.filtered,
                dropped_stale=outcome.dropped_stale,
                failed=outcome.failed,
            )
        )

    def _write_samples(self, batch: StepBatch) -> None:
        """A few trajectories of the step, with their reference answers, for people to read. Rank 0."""
        if self._client is not None and self._reader is not None:
            rows = self._reader.fetch(self._recorder.sample_keys(batch))
            references = self._client.references([row.group_id for row in rows])
            self._recorder.samples(batch, [(row, references.get(row.group_id)) for row in rows])

    def evaluate(self, version: int, label: str) -> list[SetReport]:
        """Evaluate all sets on the pool; answers go to RUN_DIR/eval_{label}.jsonl."""
        return self._ask(lambda pool: pool.evaluate(version, label))

    def state_dict(self) -> Any:
        """The rollout side's committed history. On rank 0."""
        assert self._client is not None
        return self._client.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """The history that `attach` has the pool begin from."""
        self._history = state

    def close(self, *, keep_pool: bool) -> None:
        """Disconnect from the queue and end the pool (unless kept); bounded, and safe after a failure."""
        if self._reader is not None:
            self._reader.close()
        if self._client is not None and not keep_pool:
            self._client.close()

    def _ask(self, question: Callable[[PoolClient], T]) -> T:
        """Rank 0 asks the controller; every rank gets the answer."""

        def ask() -> T:
            assert self._client is not None
            return question(self._client)

        return self._peers.on_first_rank(ask)

    def _tell(self, message: Callable[[PoolClient], Any]) -> None:
        """Rank 0 tells the controller; the other ranks do nothing."""
        if self._client is not None:
            message(self._client)

    def _read(self, question: Callable[[QueueReader], T]) -> T:
        """The leader asks the queue; every rank of its replica gets the answer."""
        answer = question(self._reader) if self._reader is not None else None
        return parallel.model_parallel_broadcast_object(answer)

    def _dump(self, directory: Path, batch: StepBatch) -> None:
        """Each leader writes its share of the whole batch, filtered groups too."""
        if self._reader is not None:
            rank, replicas = parallel.dp_rank(), parallel.dp_size()
            rows = self._reader.fetch(batch.keys[rank::replicas])
            write_batch(directory, batch.step, batch.version, rows, part=rank, parts=replicas)
