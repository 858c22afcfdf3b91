"""Held-out evaluation on the pool: samples and scores responses to the prompts of one set and reports on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megarl.common.errors import LostWithWorkers
from megarl.evaluation.accuracy import ScoredResponse
from megarl.evaluation.harness import Mode, SetReport, evaluate_set
from megarl.rollout.agents.loop_host import LoopHost
from megarl.rollout.agents.loop_run import EvalPlace, LoopJob, LoopRun
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import RequestContext
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.fleet.request_coalescer import RequestCoalescer
from megarl.rollout.tasks.prompts import EvalSet, PromptTask
from megarl.rollout.workers.worker_pool import WorkerPool

CHUNK = 32


@dataclass(frozen=True)
class Share:
    """The share of an evaluation beside training: so many requests at once in the engines, of a lower priority."""

    at_once: asyncio.Semaphore
    priority: int


async def evaluate_on_fleet(
    eval_set: EvalSet,
    pool: EnginePool,
    host: LoopHost,
    workers: WorkerPool | None = None,
    *,
    version: int,
    tag: str,
    in_turn: bool = False,
    share: Share | None = None,
) -> SetReport:
    """Sample greedy and sampled responses to every problem, score them, and fill `eval_set.records`.

    `workers`: those that run the loops; None: `host` does. `tag` makes the request ids unique. `in_turn`: requests go
    to the replicas in turn instead of by load. `share`: for an evaluation beside training. Seeds depend on (seed,
    problem, sample) only, so the same problems are sampled with the same seeds before and after training.
    """
    coalescer = RequestCoalescer(pool, chunk=CHUNK, in_turn=in_turn, background=share is not None)
    eval_set.records.clear()
    seen: set[int] = set()

    async def generate(request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """The controller admits the requests, wherever the loops are."""
        if share is None:
            return await coalescer.generate(request, context)
        async with share.at_once:
            return await coalescer.generate(request, context)

    async def respond(problem: PromptTask, index: int, mode: Mode, sample: int) -> ScoredResponse:
        place = EvalPlace(index, mode, sample, tag, 0 if share is None else share.priority)
        run = LoopRun(LoopJob.of_response(eval_set, problem, place), generate)
        try:
            ended = await (workers or host).respond(run)
        except LostWithWorkers as error:
            ended = await host.failed(run, error)
        seen.update(ended.versions)
        eval_set.records.append(ended.record)
        return ended.scored

    try:
        report = await evaluate_set(
            eval_set.name, eval_set.problems, respond, samples=eval_set.samples, version=version
        )
    finally:
        await coalescer.cancel()
    eval_set.records.sort(key=lambda record: (record["index"], record["mode"], record["sample"]))
    # Engines that have read the weights from files do not know a version.
    return replace(report, oldest=min(seen, default=version), newest=max(seen, default=version))


def record_lines(eval_sets: Sequence[EvalSet]) -> Iterator[str]:
    """Yield one JSON line per response, for people to read."""
    for eval_set in eval_sets:
        for record in eval_set.records:
            yield json.dumps({"set": eval_set.name, **record}, ensure_ascii=False)
