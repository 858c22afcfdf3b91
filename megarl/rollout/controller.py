"""RolloutController: decides what is generated, and hands finished groups to the queue. One per run, an async actor.

It owns the admission state, the prompt cursor, the reward processes and the client side of the pool. A trainer that
(re)starts says which history it goes on from (`begin`), then the version that the engines serve (`set_version`), takes
batches (`wait_batch`) and says what became of them (`commit`). Once something failed for good, every waiting and later
call raises that failure.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.common.errors import RolloutError
from megarl.common.files import write_json
from megarl.common.output import redirect_output
from megarl.config.schema import Config
from megarl.evaluation.harness import SetReport
from megarl.queue.trajectory import sample_key
from megarl.queue.transfer import QueueServer, QueueWriter, start_queue
from megarl.rollout.admission import Admission, Counters, usable_samples
from megarl.rollout.batch_stats import BatchStats, BusyClock
from megarl.rollout.devices import Held
from megarl.rollout.evaluate_on_pool import evaluate_on_pool, write_records
from megarl.rollout.pool import RolloutPool
from megarl.rollout.replica import ROLLOUT_RESOURCE, ReplicaSpec, replica_name, restart_replica
from megarl.rollout.requests import GenerateRequest, SamplingSpec, request_seed
from megarl.rollout.to_trajectory import defect, trajectory

logger = logging.getLogger(__name__)

ATTEMPTS_FILE = "attempts.json"


@dataclass(frozen=True)
class BatchReady:
    """A batch the trainer may take: `keys` of all its samples, failed ones included, in (group, sample) order.

    `timings`: declared `rollout/*` and `reward/errors` metrics of this batch.
    """

    step: int
    keys: list[str]
    counters: Counters
    timings: dict[str, float]


class RolloutController:
    """Created by the supervisor; see the module's docstring."""

    def __init__(self, spec: ReplicaSpec, partition: str, *, cwd: str = "") -> None:
        """`cwd`: the launcher's; relative paths of the config and user modules are seen from there."""
        self.spec, self.partition = spec, partition
        self.config = Config.model_validate_json(spec.config_json)
        self.run_dir = Path(spec.run_dir)
        redirect_output(self.run_dir / "logs" / "controller.log")
        if cwd:
            os.chdir(cwd)
            sys.path.insert(0, cwd)
        spec.watch_supervisor()
        batch = self.config.batch
        self._admission = Admission(batch.groups, self.config.admission.max_staleness)
        self._batches: dict[int, BatchReady] = {}
        self._stats = BatchStats()
        self._engines = BusyClock()
        self._failure: RolloutError | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._joining: set[int] = set()
        self._changed = asyncio.Event()

    async def start(self) -> dict[str, float]:
        """Start queue and reward processes, load prompts and tokenizer, attach to the replicas; seconds it took."""
        from megarl.rewards.worker_pool import RewardPool
        from megarl.rollout.prompts import PromptSource

        started = time.monotonic()
        config, timeouts = self.config, self.config.timeouts
        self._rewards = RewardPool(
            config.reward.function,
            config.reward.kwargs,
            workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
            on_error=config.reward.on_error,
            start_timeout_s=timeouts.engine_start_s,
        )
        # What takes long and imports much is not done in the event loop.
        self._queue, self._source, replicas, _ = await asyncio.gather(
            asyncio.to_thread(self._start_queue),
            asyncio.to_thread(PromptSource, config),
            self._attach_replicas(timeouts.engine_start_s),
            self._rewards.start(),
        )
        self._stats.skipped_prompts = self._source.skipped
        self._pool = RolloutPool(replicas, timeout_s=timeouts.generate_s, describe=self._log_of)
        self._writer = await asyncio.to_thread(
            QueueWriter.attach, self.partition, namespace=self.spec.namespace, timeout_s=timeouts.queue_s
        )
        gc.collect()
        gc.freeze()  # as in the trainer: a collection that walks all imported modules halts generation for 0.3 s
        return {"start_s": time.monotonic() - started}

    def _start_queue(self) -> QueueServer:
        """The queue's actors belong to this one, in a process that needs the library anyhow."""
        return start_queue(
            self.partition,
            namespace=self.spec.namespace,
            storage_units=self.config.queue.storage_units,
            node_resource=ROLLOUT_RESOURCE,
            timeout_s=self.config.timeouts.engine_start_s,
        )

    async def _attach_replicas(self, timeout_s: float) -> dict[int, Any]:
        import ray

        handles: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(handles) < self.config.rollout.replicas:
            index = len(handles)
            try:
                handles[index] = ray.get_actor(replica_name(index), namespace=self.spec.namespace)
            except ValueError:
                if time.monotonic() > deadline:
                    raise RolloutError(f"the controller waited {timeout_s:.0f} s for replica {index}") from None
                await asyncio.sleep(0.05)
        return handles

    def _log_of(self, index: int) -> str:
        return f"see {self.run_dir / 'logs' / f'replica-{index}.log'}"

    async def set_version(self, version: int, admit: bool = True) -> Counters:
        """The engines serve `version` from now on, restarted ones too. Repeating it is harmless."""
        self._check()
        for index in sorted(self._joining):
            self._pool.admit(index)
        self._joining.clear()
        self._admission.set_version(version)
        return await self.admit() if admit else self._admission.counters

    async def admit(self) -> Counters:
        """Start every group that the version allows."""
        self._check()
        groups = self._admission.admit()
        if groups:
            # Before any of them starts: whoever resumes can tell how many were started for nothing.
            write_json(self.run_dir / ATTEMPTS_FILE, {"attempts": self._admission.attempts})
        for group_id in groups:
            self._spawn(self._group(group_id))
        return self._admission.counters

    async def wait_batch(self, step: int, timeout_s: float) -> BatchReady:
        """The batch of `step`, once its groups are in the queue; the same again when asked again before `commit`.

        RolloutError naming the cause if rollout failed or `timeout_s` ran out.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._check()
            if step in self._batches:
                return self._batches[step]
            self._take(step)
            if step in self._batches:
                continue
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                groups = sorted(self._admission.in_flight)
                raise RolloutError(
                    f"the trainer waited {timeout_s:.0f} s for the batch of step {step}; {len(groups)} groups in "
                    f"flight: {groups[:8]}, replicas alive: {self._pool.alive}"
                ) from None

    def _take(self, step: int) -> None:
        taken = self._admission.batch(step)
        if taken is None:
            return
        samples = range(self.config.batch.samples_per_group)
        self._stats.engine_seconds = self._engines.take(time.monotonic())
        counters = self._admission.counters
        self._batches[step] = BatchReady(
            step=step,
            keys=[sample_key(group, index) for group in sorted(taken[0] + taken[1]) for index in samples],
            counters=counters,
            timings=self._stats.metrics(queue_depth=counters.ready, replicas_alive=len(self._pool.alive))
            | {"total/groups_rolled_back": counters.rolled_back},
        )
        self._stats = BatchStats()

    async def commit(self, step: int, *, trained: int, filtered: int, dropped_stale: int, failed: int) -> Counters:
        """What became of the groups of `step`; their rows leave the queue. ValueError if the numbers do not add up."""
        self._check()
        self._admission.commit(step, trained=trained, filtered=filtered, dropped_stale=dropped_stale, failed=failed)
        batch = self._batches.pop(step)
        self._spawn(self._writer.clear(batch.keys))
        counters = self._admission.counters
        if not counters.balanced:
            raise RolloutError(f"group counters do not add up after step {step}: {counters}")
        return counters

    async def counters(self) -> Counters:
        return self._admission.counters

    async def evaluate(self, version: int, label: str = "") -> list[SetReport]:
        """Every configured set, greedy and sampled. With `label`, all answers go to RUN_DIR/eval_{label}.jsonl."""
        self._check()
        eval_sets = await asyncio.to_thread(self._source.eval_sets)
        reports = []
        for eval_set in eval_sets:
            report = await evaluate_on_pool(
                eval_set,
                self._pool,
                self._rewards.score,
                self._source.decode,
                version=version,
                tag=f"v{version}{label}",
                by_index=self.config.run.deterministic,
            )
            reports.append(report)
        if label and eval_sets:
            write_records(self.run_dir / f"eval_{label}.jsonl", eval_sets)
        return reports

    async def references(self, group_ids: list[int]) -> dict[int, str]:
        """Reference answers of groups, for `samples.jsonl`."""
        return {group: self._source.reference(group) for group in group_ids}

    async def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: committed history and what the prompts' order depends on."""
        admission = self._admission.state_dict()
        return {"admission": admission, "source": self._source.state_dict()}

    async def begin(self, state: dict[str, Any] | None) -> Counters:
        """Go back to a committed history (None: its beginning); the trainer has started, or started again.

        Groups in flight, in the queue or at the last trainer are dropped, and counted as rolled back. An engine that
        the last trainer left in the middle of a sync is replaced. ValueError if the prompts are not the saved ones.
        """
        await self._drop_everything()
        batch, attempts = self.config.batch, self._admission.attempts
        journal = self.run_dir / ATTEMPTS_FILE
        if journal.is_file():
            attempts = max(attempts, int(json.loads(journal.read_text())["attempts"]))
        self._admission = Admission(batch.groups, self.config.admission.max_staleness)
        if state is not None:
            self._source.load_state_dict(state["source"])
        self._admission.load_state_dict(state["admission"] if state else self._admission.state_dict(), attempts)
        # Belongs to the first batch of the history.
        self._stats.skipped_prompts = 0 if state else self._source.skipped
        await self._reset_replicas()
        return self._admission.counters

    async def _drop_everything(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._writer.clear_all()
        self._batches.clear()
        self._failure, self._stats = None, BatchStats()

    async def _reset_replicas(self) -> None:
        """Every engine idle and whole; those that cannot be are replaced, and serve after the next `set_version`."""
        broken = []

        async def reset(index: int) -> None:
            try:
                await self._pool.call(index, "reset", timeout_s=self.config.timeouts.rpc_s)
            except RolloutError as error:
                logger.warning("replacing replica %d: %s", index, error)
                broken.append(index)

        await asyncio.gather(*(reset(index) for index in range(self.config.rollout.replicas)))
        await self.restart_replicas(sorted(broken))

    async def devices(self) -> list[Held]:
        """What every replica holds."""
        timeout_s = self.config.timeouts.rpc_s
        return [await self._pool.call(index, "devices", timeout_s=timeout_s) for index in self._pool.alive]

    async def restart_replicas(self, indices: list[int]) -> None:
        """Replace replicas by fresh ones under the same names; they serve after the next `set_version`.

        RolloutError if one does not come up. (The controller is their owner: a rank's actors would end with the rank.)
        """
        timeout_s = self.config.timeouts.engine_start_s

        async def restart(index: int) -> None:
            self._pool.replace(index, await restart_replica(self.spec, index, self._pool.handle(index), timeout_s))
            self._joining.add(index)

        await asyncio.gather(*(restart(index) for index in indices))

    async def shutdown(self) -> None:
        """Cancel what is in flight and end the reward processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self._rewards.close)
        self._queue.close()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        logger.error("rollout failed", exc_info=error)
        if self._failure is None:
            known = isinstance(error, (RolloutError, TimeoutError, ValueError))
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self._failure = error if isinstance(error, RolloutError) else RolloutError(f"rollout failed: {text}")
        self._changed.set()

    async def _group(self, group_id: int) -> None:
        """One prompt group from prompt to queue."""
        prompt = self._source.draw(group_id)
        sampling = SamplingSpec.training(self.config.sampling, self._source.stop_token_ids)
        requests = [
            GenerateRequest(
                request_id=f"{self.partition}-{group_id}-{index}",
                prompt_ids=prompt.ids,
                sampling=sampling,
                seed=request_seed(self.config.run.seed, group_id, index),
            )
            for index in range(self.config.batch.samples_per_group)
        ]
        self._engines.enter(group_id, time.monotonic())
        seconds = 0.0
        try:
            home = group_id if self.config.run.deterministic else None
            results = await self._pool.generate(group_id, requests, home=home)
            seconds = max(result.seconds for result in results)
        finally:
            self._engines.leave(group_id, time.monotonic(), seconds)
        judged = await asyncio.gather(*(self._judge(prompt, result) for result in results))
        rows = [
            trajectory(group_id, index, prompt.ids, result, outcome)
            for index, (result, outcome) in enumerate(zip(results, judged, strict=True))
        ]
        await self._writer.put_group(rows)
        self._admission.finish(group_id, usable_samples(row.status for row in rows))
        self._changed.set()

    async def _judge(self, prompt: Any, result: Any) -> Any:
        self._stats.generate_seconds.append(result.seconds)
        failure = defect(result)
        if failure:
            self._stats.sample_failures[failure.split(" at ")[0]] += 1
            return None
        text = self._source.decode(result.response_ids)
        started = time.monotonic()
        outcome = await self._rewards.score(prompt.judge(text, result.response_ids, result.finish_reason))
        self._stats.reward_seconds.append(time.monotonic() - started)
        if outcome.error is not None:
            self._stats.reward_errors[outcome.reason or "error"] += 1
            logger.warning("reward of a sample of %r: %s", prompt.answer, outcome.error)
        return outcome
