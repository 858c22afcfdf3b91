"""Evaluation on a pool: what is asked, who votes for what, and which responses are failures."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from megarl.chat.formats import Prompt
from megarl.common.errors import RequestFailed
from megarl.evaluation.harness import SetReport
from megarl.queue.trajectory import VersionSpan
from megarl.rewards.types import RewardInput, RewardResult
from megarl.rollout.agents.loop_host import LoopHost, SingleTurn, answer_of
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, SamplingSpec, request_seed
from megarl.rollout.orchestrator.evaluator import evaluate_on_fleet
from megarl.rollout.tasks.prompts import EvalSet, PromptTask
from tests.support.agents.scripted_agents import TOKENIZER, Counter, call_text, ids_of, toolbox_of


class Pool:
    """Answers every request with the same tokens, ended as `finish_reason` says."""

    def __init__(self, finish_reason: str, logprob: float = -1.0) -> None:
        self.finish_reason, self.logprob = finish_reason, logprob

    async def generate(self, context: Any, requests: list[GenerateRequest], **_: Any) -> list[Any]:
        return [
            GenerateResult(each.request_id, [5, 6], [self.logprob] * 2, (VersionSpan(0, 0, 2),), self.finish_reason, 0)  # type: ignore[arg-type]
            for each in requests
        ]


def evaluate(pool: Pool, outcome: RewardResult, text: str = "it is 7") -> SetReport:
    return asyncio.run(evaluate_on_fleet(single_turns(), pool, host(outcome, text), version=0, tag="t"))  # type: ignore[arg-type]


class Rewards:
    """Judges every response as `outcome`."""

    def __init__(self, outcome: RewardResult) -> None:
        self.outcome = outcome

    async def score(self, sample: RewardInput, function: int = 0) -> RewardResult:
        return self.outcome


def host(outcome: RewardResult, text: str = "") -> LoopHost:
    """A host of single turns. `text`: that of every response; "": its token ids."""
    return LoopHost(
        SingleTurn(), Rewards(outcome), lambda some: [text or str(ids) for ids in some], timeout_s=5.0  # type: ignore[arg-type]
    )  # fmt: skip


def single_turns() -> EvalSet:
    problem = PromptTask(
        Prompt(0, [{"role": "user", "content": "3 + 4?"}], "7", {}), [1, 2], SamplingSpec(8, 1.0, (0,)), "dev"
    )
    return EvalSet("dev", [problem] * 2, SamplingSpec.greedy(8, (0,)), samples=2, seed=5)


@pytest.mark.parametrize(("logprob", "failed"), [(-1.0, 0), (float("nan"), 6)])
def test_the_seeds_and_the_lines_of_single_turns(logprob: float, failed: int) -> None:
    """A response whose generation failed is scored and recorded like any other."""
    sent = []

    class Keeping(Pool):
        async def generate(self, context: Any, requests: list[GenerateRequest], **_: Any) -> list[Any]:
            sent.extend(requests)
            return await super().generate(context, requests)

    wanted, pool = single_turns(), Keeping("stop", logprob)
    running = evaluate_on_fleet(wanted, pool, host(GOOD), version=0, tag="t")  # type: ignore[arg-type]
    assert asyncio.run(running).failed_generations == failed
    places = [
        (index, mode, sample) for index in range(2) for mode, sample in (("greedy", 0), ("sampled", 0), ("sampled", 1))
    ]
    assert {each.request_id: each.seed for each in sent} == {
        f"eval-dev-t-{index}-{mode}-{sample}-0": None
        if mode == "greedy"
        else request_seed(5, (1 << 32) + index, sample)
        for index, mode, sample in places
    }
    assert wanted.records == [
        {
            "index": index, "mode": mode, "sample": sample, "prompt": "[1, 2]", "response": "[5, 6]", "reference": "7",
            "score": 1.0, "components": {"parsed": 1.0}, "error": None, "finish_reason": "stop", "response_tokens": 2,
            "versions": [[0, 0, 2]],
        }
        for index, mode, sample in places
    ]  # fmt: skip


def test_a_request_that_is_refused_costs_its_response_alone() -> None:
    class Refusing(Pool):
        async def generate(self, context: Any, requests: list[GenerateRequest], **_: Any) -> list[Any]:
            raise RequestFailed("the prompt is too long")

    report = evaluate(Refusing("stop"), GOOD)
    assert report.failed_generations == 6 and report.nothing_judged is not None


GOOD = RewardResult(1.0, {"parsed": 1.0}, answer="7")
LATE = RewardResult(0.0, error="timeout: no reward after 3 s", reason="timeout")


@pytest.mark.parametrize(
    ("pool", "outcome", "generations", "rewards"),
    [
        (Pool("stop"), GOOD, 0, 0),
        (Pool("length"), GOOD, 0, 0),
        (Pool("stop"), LATE, 0, 6),
        (Pool("abort"), GOOD, 6, 0),
        (Pool("abort"), LATE, 6, 0),  # one failure, reported by its cause
        (Pool("stop", float("nan")), GOOD, 6, 0),
    ],
)
def test_failed_responses_are_counted(pool: Pool, outcome: RewardResult, generations: int, rewards: int) -> None:
    report = evaluate(pool, outcome)
    assert (report.failed_generations, report.reward_errors) == (generations, rewards)
    assert (report.nothing_judged is None) == (generations + rewards == 0)
    assert report.greedy.mean.value == outcome.score  # counted as it is scored


@pytest.mark.parametrize(
    ("text", "outcome", "answer"),
    [
        (r"\frac{1}{2}", RewardResult(1.0, {"parsed": 1.0}, answer="1/2"), "1/2"),
        (r"\frac{3}{2}", RewardResult(0.0, {"parsed": 1.0}, answer="3/2"), "3/2"),
        ("x^2", RewardResult(0.0, {"parsed": 0.0}), None),
        ("it is 7", LATE, None),  # nothing was judged
        ("it is 7", RewardResult(1.0), "7"),  # a function of the user's, which does not say
        (r"first 8, then \boxed{x + 1}", RewardResult(1.0), "x+1"),
        ("nothing", RewardResult(0.0), None),
    ],
)
def test_what_a_response_votes_for(text: str, outcome: RewardResult, answer: str | None) -> None:
    assert answer_of(text, outcome) == answer


class ScriptedPool:
    """Turn i of every dialogue is `turns[i]`; `sent` are all requests."""

    def __init__(self, *turns: str) -> None:
        self.turns, self.sent = turns, list[GenerateRequest]()

    async def generate(self, context: Any, requests: list[GenerateRequest], **_: Any) -> list[Any]:
        self.sent += requests
        results = []
        for each in requests:
            ids = ids_of(self.turns[int(each.request_id.rsplit("-", 1)[1])])
            spans = (VersionSpan(3, 0, len(ids)),)
            results.append(GenerateResult(each.request_id, ids, [-0.5] * len(ids), spans, "stop", 0))
        return results


def evaluate_agent(pool: ScriptedPool, loop: Any, tool: Counter) -> tuple[SetReport, EvalSet]:
    class Fours:
        async def score(self, sample: RewardInput, function: int = 0) -> RewardResult:
            return RewardResult(float("4" in sample.response), {"turns": float(len(sample.turns))}, answer="4")

    box = toolbox_of(tool)
    prompt = Prompt(0, [{"role": "user", "content": "2 + 2?"}], "4", {})
    ids = box.dialogue.start(prompt.messages, box.schemas)
    problem = PromptTask(prompt, ids, SamplingSpec(256, 1.0, (0,)), "dev")
    wanted = EvalSet("dev", [problem] * 3, SamplingSpec.greedy(256, (0,)), samples=2)
    decode = lambda some: [TOKENIZER.decode(ids) for ids in some]  # noqa: E731
    own = LoopHost(loop, Fours(), decode, timeout_s=5.0, eval_toolboxes={"dev": box})  # type: ignore[arg-type]
    return asyncio.run(evaluate_on_fleet(wanted, pool, own, version=3, tag="t")), wanted  # type: ignore[arg-type]


def test_an_agent_is_evaluated_by_its_own_loop() -> None:
    pool, tool = ScriptedPool(call_text("add", a=2, b=2), "It is 4."), Counter()
    report, wanted = evaluate_agent(pool, ToolAgent(), tool)
    assert report.greedy.mean.value == report.sampled.mean.value == 1.0 and report.of_one_version
    assert len(tool.calls) == 9 and len(pool.sent) == 18
    assert {request.seed is None for request in pool.sent if "-greedy-" in request.request_id} == {True}
    seeds = [request.seed for request in pool.sent if "-sampled-" in request.request_id]
    assert len(set(seeds)) == len(seeds) == 12 and None not in seeds
    for record in wanted.records:
        assert [turn["role"] for turn in record["turns"]] == ["assistant", "tool", "assistant"]
        assert record["response"].startswith("It is 4.") and record["score"] == 1.0


def test_evaluated_loops_may_look_at_their_own_turns() -> None:
    """Requests of several problems share a call, and each loop finds its own result."""
    from examples.rl.agents.second_thoughts import SecondThoughts

    report, wanted = evaluate_agent(
        ScriptedPool("first", "It is 4."), SecondThoughts("add"), Counter(answer=lambda _: "no")
    )
    assert report.greedy.mean.value == 1.0 and {len(record["turns"]) for record in wanted.records} == {3}


def test_an_agent_whose_generation_fails_is_no_wrong_answer() -> None:
    class Failing(ScriptedPool):
        async def generate(self, context: Any, requests: list[GenerateRequest], **_: Any) -> list[Any]:
            results = await super().generate(context, requests)
            return [replace(each, logprobs=[float("nan")] * len(each.logprobs)) for each in results]

    report, _ = evaluate_agent(Failing("It is 4."), ToolAgent(), Counter())
    assert report.failed_generations == 9 and report.reward_errors == 0 and report.nothing_judged is not None


def test_a_tool_that_fails_by_itself_costs_one_response_of_an_evaluation() -> None:
    answers = iter(["4"] * 4)  # the fifth call, and those after it, find none
    tool = Counter(answer=lambda _: next(answers))
    report, wanted = evaluate_agent(ScriptedPool(call_text("add", a=2, b=2), "It is 4."), ToolAgent(), tool)
    assert report.failed_generations == 5 and len(wanted.records) == 9 == len(tool.calls)
