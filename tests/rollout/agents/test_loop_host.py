"""The loop host: one agent loop for each sample of a group, and the requests that the loops make."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megarl.common.errors import RolloutError
from megarl.config.schema import Config
from megarl.data.dataset import ShownResponse
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.agents.agent_loop import FROZEN_BYTES, AgentContext, AgentLoop
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.engine.continuation import RequestContext
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, request_seed
from megarl.rollout.engine.response_parts import ResponsePart
from tests.support.rollout.fake_rollout import VERSION, FakeBatcher, FakeRewards, FakeSource
from tests.support.rollout.group_runner import GroupRunner
from tests.support.trainer.configs import config as config_of


@pytest.fixture
def config() -> Config:
    return config_of("model", sampling={"max_tokens": 16})


def runner(config: Config, loop: AgentLoop | None = None) -> tuple[GroupRunner, FakeBatcher]:
    batcher = FakeBatcher()
    return GroupRunner(config, loop or SingleTurn(), FakeSource(), batcher.generate, FakeRewards()), batcher


def test_single_turn_asks_once_for_each_sample_and_judges_it(config: Config) -> None:
    made, batcher = runner(config)
    rows = asyncio.run(made.run(2))
    count = config.batch.samples_per_group
    assert [row.key for row in rows] == [f"2:{index}" for index in range(count)]
    assert all(row.prompt_ids == [5] * 3 and row.response_ids == [9] * 3 and row.reward == 3.0 for row in rows)
    assert all(row.response_mask == [1, 1, 1] and row.oldest_version == VERSION for row in rows)
    sampling = FakeSource.sampling
    seeds = [request_seed(config.run.seed, 2, index) for index in range(count)]
    assert batcher.asked == [
        (GenerateRequest(f"p-2-{index}-0", [5] * 3, sampling, seeds[index], routes_from=0), 2, None)
        for index in range(count)
    ]
    assert made.groups.stats.generate_seconds == [0.25] * count and len(made.groups.stats.reward_seconds) == count


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
            ctx.group_id, ctx.sample_index, ctx.prompt.ids, ids, [0.0] * len(ids), (VersionSpan(VERSION, 0, len(ids)),),
            "stop", outcome.score, response_mask=mask,
        )  # fmt: skip


def test_a_loop_of_ones_own_repeats_itself(config: Config) -> None:
    first, second = (asyncio.run(runner(config, TwoTurns())[0].run(1)) for _ in range(2))
    assert first == second and first[0].response_mask == [1, 1, 0, 1, 1, 1, 1, 1]
    assert len({tuple(row.response_ids) for row in first}) > 1  # each sample draws for itself


def test_each_turn_has_a_request_id_and_a_seed_of_its_own(config: Config) -> None:
    made, batcher = runner(config, TwoTurns())
    asyncio.run(made.run(1))
    count, run_seed = config.batch.samples_per_group, config.run.seed
    asked = {request.request_id: request.seed for request, _, _ in batcher.asked}
    assert asked == {
        f"p-1-{index}-{turn}": request_seed(run_seed, 1, index, turn) for index in range(count) for turn in range(2)
    }
    assert len(set(asked.values())) == len(asked) == 2 * count == len(made.groups.stats.generate_seconds)
    assert len(made.groups.stats.reward_seconds) == count  # the second answer is scored


def test_a_deterministic_run_sends_a_group_to_the_replica_of_its_number(config: Config) -> None:
    made, batcher = runner(config.model_copy(update={"run": config.run.model_copy(update={"deterministic": True})}))
    asyncio.run(made.run(7))
    assert [(prefix, home) for _, prefix, home in batcher.asked] == [(7, 7)] * config.batch.samples_per_group


class WithoutVersions:
    """Returns a trajectory whose tokens have no weight version."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        return replace(await SingleTurn().run(ctx), versions=())


def test_the_trajectory_of_a_loop_is_checked(config: Config) -> None:
    with pytest.raises(ValueError, match="sample 2:0: no weight version for response token 0"):
        asyncio.run(runner(config, WithoutVersions())[0].run(2))


def test_continued_and_cut_responses_are_counted(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    made, batcher = runner(config)
    generate = made.generate

    async def lose_some(request: GenerateRequest, context: RequestContext) -> GenerateResult:
        lost = {"p-2-0-0": 1, "p-2-1-0": 2}.get(request.request_id, 0)
        return replace(await generate(request, context), lost_replicas=lost, cut=request.request_id == "p-2-2-0")

    monkeypatch.setattr(made, "generate", lose_some)
    asyncio.run(made.run(2))
    metrics = made.groups.stats.metrics(replicas_serving=1, replicas_lost=1, load=EngineLoad())
    assert metrics["rollout/continued"] == 2 and metrics["rollout/cut"] == 1
    assert batcher.deadlines == [None] * config.batch.samples_per_group


def test_all_requests_of_a_group_have_the_deadline_that_began_with_it() -> None:
    config = config_of("model", rollout={"group_deadline_s": 7.0, "on_group_deadline": "fail"})
    made, batcher = runner(config, TwoTurns())
    before = time.monotonic()
    asyncio.run(made.run(1))
    [deadline] = set(batcher.deadlines)
    assert len(batcher.deadlines) == 2 * config.batch.samples_per_group
    assert 7.0 <= deadline.at - before <= 7.0 + time.monotonic() - before and deadline.policy == "fail"


class Straggling(FakeBatcher):
    """Answers sample 0 with 3 tokens; the others have as many as their number, and do not end by the deadline."""

    async def generate(self, request: GenerateRequest, context: RequestContext) -> GenerateResult:
        tokens, sample = context.tokens, int(request.request_id.split("-")[2])
        assert tokens is not None
        count = sample or 3
        tokens[request.request_id] = ResponsePart([9] * count, [-0.5] * count, (VersionSpan(VERSION, 0, count),))
        if sample == 0:
            return await super().generate(request, context)
        await asyncio.sleep(0)
        raise RolloutError("3 of 4 responses were unfinished at the group's deadline")


def test_the_lengths_of_a_group_that_fails_are_reported(config: Config) -> None:
    """Else the longest responses would vanish unseen."""
    made, _ = runner(config)
    made.generate = Straggling().generate
    with pytest.raises(RolloutError, match="unfinished at the group's deadline"):
        asyncio.run(made.run(2))
    assert sorted(made.groups.stats.failed_lengths) == [1, 2, 3, 3] and not made.groups.progress
    metrics = made.groups.stats.metrics(replicas_serving=1, replicas_lost=0, load=EngineLoad())
    assert (metrics["rollout/failed_length_mean"], metrics["rollout/failed_length_max"]) == (2.25, 3)
    sound, _ = runner(config)
    asyncio.run(sound.run(2))
    metrics = sound.groups.stats.metrics(replicas_serving=1, replicas_lost=0, load=EngineLoad())
    assert not any("failed_length" in name for name in metrics)


class Failing:
    """Fails in sample 2; the others wait until they are cancelled."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def run(self, ctx: AgentContext) -> Trajectory:
        if ctx.sample_index == 2:
            raise ConnectionError("the tool is gone")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError


def test_a_loop_that_fails_ends_the_loops_of_its_group(config: Config) -> None:
    loop = Failing()
    with pytest.raises(ConnectionError, match="the tool is gone"):
        asyncio.run(runner(config, loop)[0].run(0))
    assert loop.cancelled == config.batch.samples_per_group - 1


def test_demonstrations_need_no_engine_and_no_reward(config: Config) -> None:
    """Each sample of the group has its own, whatever the loop of the run is."""
    made, batcher = runner(config, TwoTurns())
    count = config.batch.samples_per_group
    given = tuple(ShownResponse([5, index], [7, 8, index]) for index in range(count))
    drawn = replace(made.source.draw(3), demonstrations=given)
    made.source.draw = lambda group: drawn  # type: ignore[method-assign]
    rows = asyncio.run(made.run(3))
    assert [(row.prompt_ids, row.response_ids) for row in rows] == [(d.prompt_ids, d.response_ids) for d in given]
    assert all(row.demonstrated and row.status == "ok" and row.versions == () for row in rows)
    assert not batcher.asked and not made.groups.stats.reward_seconds


class Halving:
    """A teacher for the data set "": the log-prob of token t is -t/2."""

    def scores(self, dataset: str) -> bool:
        return dataset == ""

    async def teach(self, rows: Sequence[Trajectory], dataset: str) -> list[Trajectory]:
        return [replace(row, streams={"teacher_logprobs": [-t / 2 for t in row.response_ids]}) for row in rows]


def test_the_rows_of_a_group_have_been_scored_by_its_teacher_when_they_go_to_the_queue(config: Config) -> None:
    made, _ = runner(config)
    made.host.teachers = Halving()  # type: ignore[assignment]
    rows = asyncio.run(made.run(1))
    assert all(row.streams == {"teacher_logprobs": [-t / 2 for t in row.response_ids]} for row in rows)
    assert len(made.groups.stats.teacher_seconds) == 1


@dataclass
class State:
    text: str


class Freezes(SingleTurn):
    """A loop that freezes a state of a size."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def run(self, ctx: AgentContext) -> Any:
        ctx.freeze(State("x" * self.size))
        return await super().run(ctx)


@pytest.mark.parametrize(("size", "fits"), [(FROZEN_BYTES - 100, True), (FROZEN_BYTES + 1, False)])
def test_a_state_that_is_too_large_fails_its_group(size: int, fits: bool) -> None:
    made, _ = runner(config_of("model"), Freezes(size))
    if fits:
        assert len(asyncio.run(made.run(0))) == 4
    else:
        with pytest.raises(ValueError, match=f"freezes has {size + 11} bytes of JSON; {FROZEN_BYTES} at most"):
            asyncio.run(made.run(0))
