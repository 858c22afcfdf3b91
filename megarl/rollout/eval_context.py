"""The context of an agent loop that answers a held-out problem, and what evaluations of every kind have in common."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.evaluation.harness import Mode
from megarl.queue.trajectory import Trajectory
from megarl.rewards.gsm8k import final_number
from megarl.rewards.math import last_boxed
from megarl.rewards.types import RewardInput, RewardOutcome, Turn
from megarl.rollout.batch_stats import BatchStats
from megarl.rollout.batcher import Batcher
from megarl.rollout.eval_sets import EvalProblem, EvalSet
from megarl.rollout.group_progress import GroupProgress
from megarl.rollout.loop_context import LoopContext
from megarl.rollout.prompts import Drawn
from megarl.rollout.requests import GenerateRequest, GenerateResult
from megarl.rollout.to_trajectory import defect

EVAL_SEED_OFFSET = 1 << 32  # of the groups, so that no training sample has the same seed


@dataclass(frozen=True)
class Share:
    """The share of an evaluation beside training: so many requests at once in the engines, of a lower priority."""

    at_once: asyncio.Semaphore
    priority: int


@dataclass(frozen=True)
class EvalPlace:
    """The place of a response in an evaluation; `tag` makes its request ids unique."""

    index: int
    mode: Mode
    sample: int
    tag: str


class EvalContext(LoopContext):
    """Implements `AgentContext` for one response to a held-out problem. Nothing of it is kept for a resume."""

    def __init__(
        self,
        eval_set: EvalSet,
        problem: EvalProblem,
        place: EvalPlace,
        batcher: Batcher,
        score: Callable[[RewardInput], Awaitable[RewardOutcome]],
        decode: Callable[[Sequence[int]], str],
        share: Share | None,
    ) -> None:
        assert problem.prompt is not None
        sampling = eval_set.greedy if place.mode == "greedy" else eval_set.sampled
        prompt = Drawn(problem.prompt, problem.prompt_ids, sampling, eval_set.name, eval_set.reward)
        progress = GroupProgress(problem.prompt_ids, eval_set.name)
        super().__init__(prompt, EVAL_SEED_OFFSET + place.index, place.sample, progress, eval_set.toolbox)
        self._set, self._problem, self._place = eval_set, problem, place
        self._batcher, self._score, self._decode, self._share = batcher, score, decode, share
        self._stats = BatchStats()  # of nobody: the report has its own figures
        self._text, self._outcome, self._turns = "", RewardOutcome(0.0), tuple[Turn, ...]()

    @property
    def run_seed(self) -> int:
        """See `LoopContext.run_seed`."""
        return self._set.seed

    @property
    def trains(self) -> bool:
        """See `AgentContext.trains`."""
        return False

    @property
    def seed(self) -> int | None:
        """See `AgentContext.seed`."""
        return None if self._place.mode == "greedy" else self._seed(0)

    @property
    def stats(self) -> BatchStats:
        """See `LoopContext.stats`."""
        return self._stats

    def _request(self, token_ids: Sequence[int], turn: int) -> GenerateRequest:
        place = self._place
        return GenerateRequest(
            request_id=f"eval-{self._set.name}-{place.tag}-{place.index}-{place.mode}-{place.sample}-{turn}",
            prompt_ids=list(token_ids),
            sampling=self.prompt.sampling,
            seed=None if place.mode == "greedy" else self._seed(turn),
            priority=0 if self._share is None else self._share.priority,
        )

    async def _respond(self, request: GenerateRequest, turn: int) -> GenerateResult:
        async with contextlib.nullcontext() if self._share is None else self._share.at_once:
            prefix = None if turn == 0 else (self._place.index, self._place.mode, self._place.sample)
            near = self._replica if turn else None
            return await self._batcher.generate(request, prefix, near=near)

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardOutcome | None:
        """See `AgentContext.judge`."""
        if defect(result):
            return None
        self._text, self._turns = self._decode(result.response_ids), tuple(turns)
        judged = self._problem.reward_input(self._text, result.response_ids, result.finish_reason)
        self._outcome = await self._score(replace(judged, turns=self._turns) if turns else judged)
        return self._outcome

    def scored(self, row: Trajectory) -> ScoredResponse:
        """Return what the report needs of the trajectory that the loop has returned."""
        failure = None
        if self._outcome.error is not None:
            failure = SampleFailure("reward", self._outcome.error)
        elif row.status == "failed":
            failure = SampleFailure("generation", row.failure)
        return ScoredResponse(
            score=row.reward,
            answer=answer_of(self._text, self._outcome) if failure is None else None,
            tokens=len(row.response_ids),
            truncated=row.finish_reason == "length",
            failure=failure,
        )

    def record(self, row: Trajectory) -> dict[str, Any]:
        """Return the line of `eval_LABEL.jsonl`; `response` is the model's last turn."""
        return {
            "index": self._place.index,
            "mode": self._place.mode,
            "sample": self._place.sample,
            "prompt": self._decode(self._problem.prompt_ids),
            "response": self._text,
            "turns": [asdict(turn) for turn in self._turns],
            "reference": self._problem.reference,
            "score": row.reward,
            "components": row.reward_components,
            "error": self._outcome.error,
            "finish_reason": row.finish_reason,
            "response_tokens": len(row.response_ids),
            "versions": [[span.version, span.start, span.end] for span in row.versions],
        }


def answer_of(text: str, outcome: RewardOutcome) -> str | None:
    """Return the final answer as a string for voting; None if there is none.

    It is the answer that the reward function judged; for a function that does not return its answer, what is boxed,
    else the last number. None if the function failed or could not parse an answer.
    """
    if outcome.answer is not None:
        return outcome.answer
    if outcome.error is not None or outcome.components.get("parsed", 1.0) == 0.0:
        return None
    boxed = last_boxed(text)
    if boxed is not None:
        return "".join(boxed.split())
    number = final_number(text)
    return None if number is None else str(number)
