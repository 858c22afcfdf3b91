"""Evaluation on a pool: what is asked, who votes for what, and which responses are failures."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megarl.evaluation.harness import SetReport
from megarl.queue.trajectory import VersionSpan
from megarl.rewards.types import RewardInput, RewardOutcome
from megarl.rollout.evaluate_on_fleet import EvalProblem, EvalSet, answer_of, evaluate_on_fleet
from megarl.rollout.requests import GenerateRequest, GenerateResult, SamplingSpec


class Pool:
    """Answers every request with the same tokens, ended as `finish_reason` says."""

    def __init__(self, finish_reason: str, logprob: float = -1.0) -> None:
        self.finish_reason, self.logprob = finish_reason, logprob

    async def generate(self, name: str, requests: list[GenerateRequest], **_: Any) -> list[Any]:
        return [
            GenerateResult(each.request_id, [5, 6], [self.logprob] * 2, (VersionSpan(0, 0, 2),), self.finish_reason, 0)  # type: ignore[arg-type]
            for each in requests
        ]


def evaluate(pool: Pool, outcome: RewardOutcome, text: str = "it is 7") -> SetReport:
    async def score(sample: RewardInput) -> RewardOutcome:
        return outcome

    problems = [EvalProblem([1, 2], lambda text, ids, reason: RewardInput("", text, ids, reason), "7")] * 2
    spec = SamplingSpec.greedy(8, (0,))
    wanted = EvalSet("dev", problems, spec, spec, samples=2)
    return asyncio.run(evaluate_on_fleet(wanted, pool, score, lambda ids: text, version=0, tag="t"))  # type: ignore[arg-type]


GOOD = RewardOutcome(1.0, {"parsed": 1.0}, answer="7")
LATE = RewardOutcome(0.0, error="timeout: no reward after 3 s", reason="timeout")


@pytest.mark.parametrize(
    ("pool", "outcome", "generations", "rewards"),
    [
        (Pool("stop"), GOOD, 0, 0),
        (Pool("length"), GOOD, 0, 0),
        (Pool("stop"), LATE, 0, 6),
        (Pool("abort"), GOOD, 6, 0),
        (Pool("abort"), LATE, 6, 0),  # one failure, told by its cause
        (Pool("stop", float("nan")), GOOD, 6, 0),
    ],
)
def test_failed_responses_are_counted(pool: Pool, outcome: RewardOutcome, generations: int, rewards: int) -> None:
    report = evaluate(pool, outcome)
    assert (report.failed_generations, report.reward_errors) == (generations, rewards)
    assert (report.nothing_judged is None) == (generations + rewards == 0)
    assert report.greedy.mean.value == outcome.score  # counted as it is scored


@pytest.mark.parametrize(
    ("text", "outcome", "answer"),
    [
        (r"\frac{1}{2}", RewardOutcome(1.0, {"parsed": 1.0}, answer="1/2"), "1/2"),
        (r"\frac{3}{2}", RewardOutcome(0.0, {"parsed": 1.0}, answer="3/2"), "3/2"),
        ("x^2", RewardOutcome(0.0, {"parsed": 0.0}), None),
        ("it is 7", LATE, None),  # nothing was judged
        ("it is 7", RewardOutcome(1.0), "7"),  # a function of the user's, which does not say
        (r"first 8, then \boxed{x + 1}", RewardOutcome(1.0), "x+1"),
        ("nothing", RewardOutcome(0.0), None),
    ],
)
def test_what_a_response_votes_for(text: str, outcome: RewardOutcome, answer: str | None) -> None:
    assert answer_of(text, outcome) == answer
