"""Held-out evaluation on the pool: samples and scores responses to the prompts of one set and reports on them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megarl.common.errors import LostWithWorkers
from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.evaluation.harness import Mode, SetReport, evaluate_set
from megarl.rewards.types import RewardInput, RewardOutcome
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.batcher import Batcher
from megarl.rollout.eval_context import (
    EVAL_SEED_OFFSET,
    EvalContext,
    EvaluatedResponse,
    Share,
    answer_of,
    evaluate_response,
)
from megarl.rollout.eval_sets import EvalPlace, EvalProblem, EvalSet, EvalTask
from megarl.rollout.fleet import Fleet
from megarl.rollout.request_context import Generate, RequestContext
from megarl.rollout.requests import GenerateRequest, GenerateResult, request_seed
from megarl.rollout.to_trajectory import generation_failure

CHUNK = 32

Elsewhere = Callable[[EvalTask, Generate], Awaitable[EvaluatedResponse]]
"""Runs the loop of a response in another process, whose requests go this way (`WorkerGroups.respond`)."""


async def evaluate_on_fleet(
    eval_set: EvalSet,
    pool: Fleet,
    score: Callable[[RewardInput], Awaitable[RewardOutcome]],
    decode: Callable[[Sequence[int]], str],
    *,
    version: int,
    tag: str,
    in_turn: bool = False,
    share: Share | None = None,
    loop: AgentLoop | None = None,
    elsewhere: Elsewhere | None = None,
) -> SetReport:
    """Sample greedy and sampled responses to every problem, score them, and fill `eval_set.records`.

    `tag` makes the request ids unique. `in_turn`: requests go to the replicas in turn instead of by load. `share`: for
    an evaluation beside training. `loop`: that of an agent; None for single turns. `elsewhere`: where it runs; None:
    here. Seeds depend on (seed, problem, sample) only, so the same problems are sampled with the same seeds before and
    after training.
    """
    batcher = Batcher(pool, chunk=CHUNK, in_turn=in_turn, background=share is not None)
    generate, priority = batcher.generate, 0
    if share is not None:
        generate, priority = partial(share.generate, batcher.generate), share.priority
    eval_set.records.clear()
    seen: set[int] = set()

    async def respond(problem: EvalProblem, index: int, mode: Mode, sample: int) -> ScoredResponse:
        if loop is None:
            return await respond_once(problem, index, mode, sample)
        task = EvalTask(eval_set, problem, EvalPlace(index, mode, sample, tag), priority)
        ctx = EvalContext(task, generate, score, decode)
        try:
            ended = await (evaluate_response(loop, ctx) if elsewhere is None else elsewhere(task, generate))
        except LostWithWorkers as error:
            ended = ctx.failed(error)
        seen.update(ended.versions)
        eval_set.records.append(ended.record)
        return ended.scored

    async def respond_once(problem: EvalProblem, index: int, mode: Mode, sample: int) -> ScoredResponse:
        request = GenerateRequest(
            request_id=f"eval-{eval_set.name}-{tag}-{index}-{mode}-{sample}",
            prompt_ids=problem.prompt_ids,
            sampling=eval_set.greedy if mode == "greedy" else eval_set.sampled,
            seed=None if mode == "greedy" else request_seed(eval_set.seed, EVAL_SEED_OFFSET + index, sample),
            priority=priority,
        )
        result = await generate(request, RequestContext())
        seen.update(span.version for span in result.versions if span.version >= 0)
        text = decode(result.response_ids)
        outcome = await score(problem.reward_input(text, result.response_ids, result.finish_reason))
        eval_set.records.append(_record(problem, index, mode, sample, text, result, outcome, decode))
        return ScoredResponse(
            score=outcome.score,
            answer=answer_of(text, outcome),
            tokens=len(result.response_ids),
            truncated=result.finish_reason == "length",
            failure=_failure(result, outcome),
        )

    try:
        report = await evaluate_set(
            eval_set.name, eval_set.problems, respond, samples=eval_set.samples, version=version
        )
    finally:
        await batcher.cancel()
    eval_set.records.sort(key=lambda record: (record["index"], record["mode"], record["sample"]))
    # Engines that have read the weights from files do not know a version.
    return replace(report, oldest=min(seen, default=version), newest=max(seen, default=version))


def _failure(result: GenerateResult, outcome: RewardOutcome) -> SampleFailure | None:
    """Return why a response has failed: its generation, else its reward function; None if neither has."""
    if message := generation_failure(result):
        return SampleFailure("generation", message)
    return None if outcome.error is None else SampleFailure("reward", outcome.error)


def _record(
    problem: EvalProblem, index: int, mode: Mode, sample: int, text: str, result: GenerateResult,
    outcome: RewardOutcome, decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:  # fmt: skip
    return {
        "index": index,
        "mode": mode,
        "sample": sample,
        "prompt": decode(problem.prompt_ids),
        "response": text,
        "reference": problem.reference,
        "score": outcome.score,
        "components": outcome.components,
        "error": outcome.error,
        "finish_reason": result.finish_reason,
        "response_tokens": len(result.response_ids),
        "versions": [[span.version, span.start, span.end] for span in result.versions],
    }


def record_lines(eval_sets: Sequence[EvalSet]) -> Iterator[str]:
    """Yield one JSON line per response, for people to read."""
    for eval_set in eval_sets:
        for record in eval_set.records:
            yield json.dumps({"set": eval_set.name, **record}, ensure_ascii=False)
