"""The context of an agent loop that answers a held-out problem, and what evaluations of every kind have in common.

A loop runs in the controller, or in an agent worker. Either way its requests reach the engines through the controller,
which admits them (`Share`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.common.errors import RequestFailed, ToolFailed
from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.queue.trajectory import Trajectory
from megarl.rewards.builtin.gsm8k import final_number
from megarl.rewards.builtin.math import last_boxed
from megarl.rewards.types import RewardInput, RewardOutcome, Turn
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.agents.batch_stats import BatchStats
from megarl.rollout.agents.context import LoopContext
from megarl.rollout.agents.trajectory_builder import failed_trajectory, sample_rows
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import Generate, RequestContext
from megarl.rollout.resume.group_progress import GroupProgress, UnfinishedGroup
from megarl.rollout.tasks.eval_sets import EvalTask
from megarl.rollout.tasks.prompts import PromptTask

EVAL_SEED_OFFSET = 1 << 32  # of the groups, so that no training sample has the same seed


@dataclass(frozen=True)
class Share:
    """The share of an evaluation beside training: so many requests at once in the engines, of a lower priority."""

    at_once: asyncio.Semaphore
    priority: int

    async def generate(self, generate: Generate, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        """Wait for a place, and have the engines answer the request by `generate`."""
        async with self.at_once:
            return await generate(request, context)


@dataclass(frozen=True)
class EvaluatedResponse:
    """The end of a loop in an evaluation. `record`: its line of `eval_LABEL.jsonl`; `versions`: of its tokens."""

    scored: ScoredResponse
    record: dict[str, Any]
    versions: frozenset[int]


def eval_group(task: EvalTask) -> int:
    """Return the number that stands for the group of a response, from which its seeds follow."""
    return EVAL_SEED_OFFSET + task.place.index


def eval_drawn(task: EvalTask) -> PromptTask:
    """Return the problem of a response as a loop gets it."""
    chosen = task.chosen
    return PromptTask(task.problem.prompt, task.problem.prompt_ids, task.sampling, chosen.name, chosen.reward)


def eval_request_context(task: EvalTask, turn: int, near: int | None) -> RequestContext:
    """Return the context of a request: the turns of one response share their beginning."""
    place = task.place
    return RequestContext((place.index, place.mode, place.sample), near=near) if turn else RequestContext()


class EvalContext(LoopContext):
    """Implements `AgentContext` for one response to a held-out problem. Nothing of it is kept for a resume."""

    def __init__(
        self,
        task: EvalTask,
        generate: Generate,
        score: Callable[[RewardInput], Awaitable[RewardOutcome]],
        decode: Callable[[Sequence[int]], str],
        kept: UnfinishedGroup | None = None,
        persist: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`kept`: what the loop had in a worker that was lost. `persist`: keeps what it has where that outlives it."""
        progress = GroupProgress(task.problem.prompt_ids, task.chosen.name, kept)
        super().__init__(eval_drawn(task), eval_group(task), task.place.sample, progress, task.chosen.toolbox)
        self._task, self._generate, self._score, self._decode = task, generate, score, decode
        self._outlive = persist
        self._stats = BatchStats()  # of nobody: the report has its own figures
        self._text, self._outcome, self._turns = "", RewardOutcome(0.0), tuple[Turn, ...]()

    @property
    def progress(self) -> GroupProgress:
        """The requests and the records of the loop."""
        return self._progress

    @property
    def run_seed(self) -> int:
        """See `LoopContext.run_seed`."""
        return self._task.chosen.seed

    @property
    def trains(self) -> bool:
        """See `AgentContext.trains`."""
        return False

    @property
    def seed(self) -> int | None:
        """See `AgentContext.seed`."""
        return None if self._task.place.mode == "greedy" else self._seed(0)

    @property
    def stats(self) -> BatchStats:
        """See `LoopContext.stats`."""
        return self._stats

    def _request(self, token_ids: Sequence[int], turn: int) -> GenerateRequest:
        place = self._task.place
        return GenerateRequest(
            request_id=f"eval-{self._task.chosen.name}-{place.tag}-{place.index}-{place.mode}-{place.sample}-{turn}",
            prompt_ids=list(token_ids),
            sampling=self.prompt.sampling,
            seed=None if place.mode == "greedy" else self._seed(turn),
            priority=self._task.priority,
        )

    async def _respond(self, request: GenerateRequest, turn: int) -> GenerateResult:
        return await self._generate(request, eval_request_context(self._task, turn, self._replica))

    async def _persist(self) -> None:
        if self._outlive is not None:
            await self._outlive()

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardOutcome | None:
        """See `AgentContext.judge`."""
        self._text, self._turns = self._decode(result.response_ids), tuple(turns)
        judged = self._task.problem.reward_input(self._text, result.response_ids, result.finish_reason)
        self._outcome = await self._score(replace(judged, turns=self._turns) if turns else judged)
        return self._outcome

    def ended(self, made: Trajectory | Sequence[Trajectory]) -> EvaluatedResponse:
        """Return the end of the loop; of several trajectories the longest one is told."""
        rows = sample_rows(made, self.group_id, self.sample_index)
        longest = max(rows, key=lambda row: len(row.response_ids))
        versions = frozenset(span.version for row in rows for span in row.versions if span.version >= 0)
        return EvaluatedResponse(self._scored(longest), self._line(longest), versions)

    def failed(self, error: Exception) -> EvaluatedResponse:
        """Return the end of a loop that has failed, as a group fails in training."""
        return self.ended(failed_trajectory(self.group_id, self.sample_index, str(error)))

    def _scored(self, row: Trajectory) -> ScoredResponse:
        """Return what the report needs of the trajectory that the loop has returned."""
        failure = None
        error = self._outcome.error
        if row.status == "failed" and row.failure != error:  # that of a reward that drops its sample
            failure = SampleFailure("generation", row.failure)
        elif error is not None:
            failure = SampleFailure("reward", error)
        return ScoredResponse(
            score=row.reward,
            answer=answer_of(self._text, self._outcome),
            tokens=len(row.response_ids),
            truncated=row.finish_reason == "length",
            failure=failure,
        )

    def _line(self, row: Trajectory) -> dict[str, Any]:
        """Return the line of `eval_LABEL.jsonl`; `response` is the model's last turn."""
        turns = {"turns": [asdict(turn) for turn in self._turns]} if self._toolbox is not None else {}  # of an agent
        return {
            "index": self._task.place.index,
            "mode": self._task.place.mode,
            "sample": self._task.place.sample,
            "prompt": self._decode(self._task.problem.prompt_ids),
            "response": self._text,
            **turns,
            "reference": self._task.problem.reference,
            "score": row.reward,
            "components": row.reward_components,
            "error": self._outcome.error,
            "finish_reason": row.finish_reason,
            "response_tokens": len(row.response_ids),
            "versions": [[span.version, span.start, span.end] for span in row.versions],
        }


async def evaluate_response(loop: AgentLoop, ctx: EvalContext) -> EvaluatedResponse:
    """Run the loop of one response; a tool or a request that fails costs this response alone."""
    try:
        made = await loop.run(ctx)
    except (ToolFailed, RequestFailed) as error:
        return ctx.failed(error)
    return ctx.ended(made)


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
