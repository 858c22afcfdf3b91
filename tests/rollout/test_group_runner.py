"""A group is its samples' agent loops; a loop that fails takes its group along, and no other."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rewards.types import RewardInput, RewardOutcome
from megarl.rollout.admission import Admission
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.single_turn import SingleTurn
from megarl.rollout.background import BackgroundTasks
from megarl.rollout.controller import RolloutController
from megarl.rollout.failure_policy import FailurePolicy
from megarl.rollout.group_runner import GroupRunner
from megarl.rollout.requests import GenerateRequest, GenerateResult, request_seed
from tests.support.pool import pool_config


@dataclass
class FakeBatcher:
    """Answers with as many tokens as the request's prompt has."""

    asked: list[tuple[str, list[int], int | None, Any, int | None]] = field(default_factory=list)

    async def generate(self, request: GenerateRequest, prefix: Any = None, home: int | None = None) -> GenerateResult:
        self.asked.append((request.request_id, request.prompt_ids, request.seed, prefix, home))
        ids = [9] * len(request.prompt_ids)
        spans = (VersionSpan(4, 0, len(ids)),)
        return GenerateResult(request.request_id, ids, [-0.5] * len(ids), spans, "stop", 0, 0.25)


class FakeSource:
    stop_token_ids = (2,)

    def draw(self, group_id: int) -> Any:
        def judge(text: str, ids: list[int], reason: str) -> RewardInput:
            return RewardInput("", text, ids, reason)

        return SimpleNamespace(ids=[5] * (group_id + 1), reward_input=judge, answer="7")

    def decode(self, ids: list[int]) -> str:
        return "x" * len(ids)


class FakeRewards:
    async def score(self, judged: RewardInput) -> RewardOutcome:
        return RewardOutcome(float(len(judged.response)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return pool_config(tmp_path_factory.mktemp("group-runner"))


def runner(config: Config, loop: AgentLoop | None = None) -> tuple[GroupRunner, FakeBatcher]:
    batcher = FakeBatcher()
    made = GroupRunner(
        config, loop or SingleTurn(), FakeSource(), batcher, FakeRewards(), partition="p"  # type: ignore[arg-type]
    )  # fmt: skip
    return made, batcher


def test_single_turn_asks_once_for_each_sample_and_judges_it(config: Config) -> None:
    made, batcher = runner(config)
    rows = asyncio.run(made.run(2))
    count = config.batch.samples_per_group
    assert [row.key for row in rows] == [f"2:{index}" for index in range(count)]
    assert all(row.prompt_ids == [5] * 3 and row.response_ids == [9] * 3 and row.reward == 3.0 for row in rows)
    assert all(row.response_mask == [1, 1, 1] and row.oldest_version == 4 for row in rows)
    seeds = [request_seed(config.run.seed, 2, index) for index in range(count)]
    assert batcher.asked == [(f"p-2-{index}-0", [5] * 3, seeds[index], 2, None) for index in range(count)]
    assert made.stats.generate_seconds == [0.25] * count and len(made.stats.reward_seconds) == count


class TwoTurns:
    """Appends a token of its own between two answers, drawn from the context's generator."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        first = await ctx.generate(ctx.prompt.ids)
        given = [ctx.rng.randrange(100)]
        second = await ctx.generate([*ctx.prompt.ids, *first.response_ids, *given])
        outcome = await ctx.judge(second)
        ids = [*first.response_ids, *given, *second.response_ids]
        mask = [*[1] * len(first.response_ids), 0, *[1] * len(second.response_ids)]
        assert outcome is not None
        return Trajectory(
            ctx.group_id, ctx.sample_index, ctx.prompt.ids, ids, [0.0] * len(ids), (VersionSpan(4, 0, len(ids)),),
            "stop", outcome.score, response_mask=mask,
        )  # fmt: skip


def test_a_loop_of_ones_own_repeats_itself(config: Config) -> None:
    first, second = (asyncio.run(runner(config, TwoTurns())[0].run(1)) for _ in range(2))
    assert first == second and first[0].response_mask == [1, 1, 0, 1, 1, 1, 1, 1]
    assert len({tuple(row.response_ids) for row in first}) > 1  # each sample draws for itself


class Failing:
    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.group_id == 1 and ctx.sample_index == 2:
            raise ConnectionError("the tool is gone")
        return await SingleTurn().run(ctx)


@dataclass
class FakeWriter:
    groups: list[list[Trajectory]] = field(default_factory=list)

    async def put_group(self, rows: list[Trajectory]) -> None:
        self.groups.append(rows)


def test_a_failed_group_is_counted_and_the_next_one_is_not_its_concern(config: Config) -> None:
    admission, writer = Admission(2), FakeWriter()
    admission.set_version(0)
    controller: Any = SimpleNamespace(
        _runner=runner(config, Failing())[0], _failures=FailurePolicy("count", 2), _writer=writer,
        _admission=admission, _tasks=BackgroundTasks(),
    )  # fmt: skip

    async def run() -> None:
        for group_id in admission.admit():
            await RolloutController._group(controller, group_id)

    asyncio.run(run())
    good, failed = writer.groups
    assert all(row.status == "ok" for row in good)
    assert [(row.key, row.status, row.failure, row.oldest_version) for row in failed] == [
        (f"1:{index}", "failed", "the tool is gone", -1) for index in range(config.batch.samples_per_group)
    ]
    assert admission.batch(0) == ([0], [1])
