"""Held-out evaluation on the pool: samples and scores responses to the prompts of one set and reports on them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from megarl.common.errors import LostWithWorkers
from megarl.evaluation.accuracy import ScoredResponse
from megarl.evaluation.harness import Mode, SetReport, evaluate_set
from megarl.rewards.types import RewardInput, RewardOutcome
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.eval_context import (
    EvalContext,
    EvaluatedResponse,
    Share,
    evaluate_response,
)
from megarl.rollout.engine.request_context import Generate
from megarl.rollout.fleet.engine_pool import EnginePool
from megarl.rollout.fleet.request_coalescer import RequestCoalescer
from megarl.rollout.tasks.eval_sets import EvalPlace, EvalProblem, EvalSet, EvalTask

CHUNK = 32

Elsewhere = Callable[[EvalTask, Generate], Awaitable[EvaluatedResponse]]
"""Runs the loop of a response in another process, whose requests go this way (`WorkerGroups.respond`)."""


async def evaluate_on_fleet(
    eval_set: EvalSet,
    pool: EnginePool,
    score: Callable[[RewardInput], Awaitable[RewardOutcome]],
    decode: Callable[[Sequence[int]], str],
    *,
    loop: AgentLoop,
    version: int,
    tag: str,
    in_turn: bool = False,
    share: Share | None = None,
    elsewhere: Elsewhere | None = None,
) -> SetReport:
    """Sample greedy and sampled responses to every problem, score them, and fill `eval_set.records`.

    `tag` makes the request ids unique. `in_turn`: requests go to the replicas in turn instead of by load. `share`: for
    an evaluation beside training. `elsewhere`: where the `loop` runs; None: here. Seeds depend on (seed, problem,
    sample) only, so the same problems are sampled with the same seeds before and after training.
    """
    batcher = RequestCoalescer(pool, chunk=CHUNK, in_turn=in_turn, background=share is not None)
    generate: Generate = batcher.generate
    priority = 0
    if share is not None:
        generate, priority = partial(share.generate, generate), share.priority
    eval_set.records.clear()
    seen: set[int] = set()

    async def respond(problem: EvalProblem, index: int, mode: Mode, sample: int) -> ScoredResponse:
        task = EvalTask(eval_set, problem, EvalPlace(index, mode, sample, tag), priority)
        ctx = EvalContext(task, generate, score, decode)
        try:
            ended = await (evaluate_response(loop, ctx) if elsewhere is None else elsewhere(task, generate))
        except LostWithWorkers as error:
            ended = ctx.failed(error)
        seen.update(ended.versions)
        eval_set.records.append(ended.record)
        return ended.scored

    try:
        report = await evaluate_set(
            eval_set.name, eval_set.problems, respond, samples=eval_set.samples, version=version
        )
    finally:
        await batcher.cancel()
    eval_set.records.sort(key=lambda record: (record["index"], record["mode"], record["sample"]))
    # Engines that have read the weights from files do not know a version.
    return replace(report, oldest=min(seen, default=version), newest=max(seen, default=version))


def record_lines(eval_sets: Sequence[EvalSet]) -> Iterator[str]:
    """Yield one JSON line per response, for people to read."""
    for eval_set in eval_sets:
        for record in eval_set.records:
            yield json.dumps({"set": eval_set.name, **record}, ensure_ascii=False)
