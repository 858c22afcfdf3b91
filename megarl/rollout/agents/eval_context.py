"""The context of an agent loop that answers a held-out problem, and what an evaluation keeps of its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megarl.evaluation.accuracy import SampleFailure, ScoredResponse
from megarl.queue.trajectory import Trajectory
from megarl.rewards.builtin.gsm8k import final_number
from megarl.rewards.builtin.math import last_boxed
from megarl.rewards.types import RewardOutcome, Turn
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.trajectory_builder import sample_rows
from megarl.rollout.engine.messages import GenerateResult


@dataclass(frozen=True)
class EvaluatedResponse:
    """The end of a loop in an evaluation. `record`: its line of `eval_LABEL.jsonl`; `versions`: of its tokens."""

    scored: ScoredResponse
    record: dict[str, Any]
    versions: frozenset[int]


class EvalContext(AgentContext):
    """The context of one response to a held-out problem. Nothing of it is kept for a resume."""

    _text, _outcome, _turns = "", RewardOutcome(0.0), tuple[Turn, ...]()

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardOutcome | None:
        """See `AgentContext.judge`."""
        self._turns = tuple(turns)
        self._text, self._outcome = await self._judged(result, turns)
        return self._outcome

    async def ended(self, made: Trajectory | Sequence[Trajectory]) -> EvaluatedResponse:
        """Return the end of the loop; of several trajectories the longest one is reported."""
        rows = sample_rows(made, *self.place)
        longest = max(rows, key=lambda row: len(row.response_ids))
        versions = frozenset(span.version for row in rows for span in row.versions if span.version >= 0)
        return EvaluatedResponse(self._scored(longest), await self._line(longest), versions)

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

    async def _line(self, row: Trajectory) -> dict[str, Any]:
        """Return the line of `eval_LABEL.jsonl`; `response` is the model's last turn."""
        place = self._run.job.evaluated
        assert place is not None
        turns = {"turns": [asdict(turn) for turn in self._turns]} if self._toolbox is not None else {}  # of an agent
        return {
            "index": place.index,
            "mode": place.mode,
            "sample": place.sample,
            "prompt": await self._decoder.text(self.prompt.ids),
            "response": self._text,
            **turns,
            "reference": self.prompt.answer,
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
