"""Two steps of a policy whose log-probs are partly computed before their batch is complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megarl.queue.streams import OLD_LOGPROBS, REFERENCE_LOGPROBS
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.run import idle_logprobs
from megarl.run.idle_logprobs import IdleLogprobs
from megarl.run.peers import Peers
from megarl.run.step import train_step
from megarl.run.step_batch import StepBatch
from megarl.run.step_plan import plan_step
from megarl.telemetry.declarations import step_metrics
from megarl.telemetry.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import LogProbs, Policy
from tests.support.ranks.policy import policy_under

Pass = tuple[str, list[str]]  # the stream, and the samples of this replica


class ScriptedPool:
    """Groups finish as `answers` say, one answer per question on rank 0; after the last one the batch is there."""

    def __init__(self, rows: Sequence[Trajectory]) -> None:
        self._rows = {row.key: row for row in rows}
        self.ready: Future[None] = Future()
        self._answers: list[list[int]] = []

    def begin(self, answers: Sequence[list[int]]) -> None:
        self.ready, self._answers = Future(), list(answers)
        if torch.distributed.get_rank() or not answers:
            self.ready.set_result(None)  # the other ranks go on until rank 0 tells them

    def upcoming(self, step: int) -> tuple[dict[int, list[str]], int]:
        answer = self._answers.pop(0)
        if not self._answers:
            self.ready.set_result(None)
        return {group: [key for key, row in self._rows.items() if row.group_id == group] for group in answer}, 0

    def tags_of(self, keys: Sequence[str], rebuilds: int) -> list[SampleTag]:
        return [self._rows[key].tag for key in keys]

    def rows_of(self, keys: Sequence[str], rebuilds: int) -> list[Trajectory]:
        return [self._rows[key] for key in keys]


class PhaseRecorder:
    def __init__(self) -> None:
        self.timer = PhaseTimer()

    @contextmanager
    def phase(self, name: Any) -> Iterator[None]:
        with self.timer.phase(name):
            yield


def two_steps(
    model_dir: Path,
    rows: list[Trajectory],
    layout: dict[str, Any],
    batches: list[list[int]],
    answers: list[list[list[int]]],
    **changes: Any,
) -> list[dict[str, Any]]:
    """Return of each step what this rank computed early and late, and the log-probs of each sample of its update.

    `batches`: the groups of each step; `answers`: the groups that were upcoming, question by question. `plain`: the
    log-probs of all rows under the weights before the step, by a pass of their own.
    """
    with policy_under(model_dir, layout, **changes) as policy, mock.patch.object(idle_logprobs, "POLL_S", 0.01):
        peers, pool, recorder = Peers(policy.config.timeouts), ScriptedPool(rows), PhaseRecorder()
        idle = IdleLogprobs(policy.config, policy, peers, pool, recorder)  # type: ignore[arg-type]
        try:
            return [
                _step(policy, idle, pool, recorder, rows, step, batch, script)
                for step, (batch, script) in enumerate(zip(batches, answers, strict=True))
            ]
        finally:
            torch.distributed.destroy_process_group(peers.group)


def _step(
    policy: Policy, idle: IdleLogprobs, pool: ScriptedPool, recorder: PhaseRecorder, rows: list[Trajectory],
    step: int, groups: list[int], answers: list[list[int]],
) -> dict[str, Any]:  # fmt: skip
    plain = _plain(policy, rows)
    taken = [row for row in rows if row.group_id in groups]
    batch = StepBatch(step, step, [row.key for row in taken], [row.tag for row in taken], {})
    trained: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    update = policy.update

    def recorded(samples: Sequence[TrainSample], *args: Any, **options: Any) -> dict[str, float]:
        for sample in samples:
            assert sample.key not in trained
            trained[sample.key] = (sample.streams[OLD_LOGPROBS], sample.streams[REFERENCE_LOGPROBS])
        return update(samples, *args, **options)

    pool.begin(answers)
    with passes_of(policy) as early:
        idle.work_until(pool.ready, step, step)
    plan = plan_step(batch.tags, policy.config, dp_size=parallel.dp_size(), version=step)
    given = idle.collect(batch, plan)
    recorder.timer.finish_step()
    with passes_of(policy) as late, mock.patch.object(policy, "update", recorded):
        by_key, metrics = {row.key: row for row in taken}, step_metrics()
        train_step(policy, plan, by_key, policy.config, recorder.timer, metrics, step=step, early=given)
    return {
        "early": early, "late": late, "trained": trained, "plain": plain, "timings": batch.timings,
        "complete": given.complete, "given": {stream: sorted(values) for stream, values in given.values.items()},
    }  # fmt: skip


def _plain(policy: Policy, rows: Sequence[Trajectory]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    samples = [TrainSample.of(row) for row in rows]
    old = policy.compute_logprobs(samples)
    reference = policy.compute_logprobs(samples, reference=True)
    return {s.key: (o.logprobs_R, r.logprobs_R) for s, o, r in zip(samples, old, reference, strict=True)}


@contextmanager
def passes_of(policy: Policy) -> Iterator[list[Pass]]:
    """Collect the log-prob passes of the block."""
    found: list[Pass] = []
    compute = policy.compute_logprobs

    def watched(
        samples: Sequence[TrainSample], *, reference: bool = False, teacher: str = "", packed: None = None
    ) -> list[LogProbs]:
        stream = REFERENCE_LOGPROBS if reference else OLD_LOGPROBS
        found.append((stream, [sample.key for sample in samples]))
        return compute(samples, reference=reference, teacher=teacher, packed=packed)

    with mock.patch.object(policy, "compute_logprobs", watched):
        yield found
