"""The records that a context keeps for a resume, and the calls that it bounds."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megarl.common.errors import RolloutError, ToolFailed
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents import agent_loop
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.agents.tool_agent import finish
from megarl.rollout.resume.group_progress import FrozenLoop, UnfinishedGroup
from tests.support.agents.frozen_agents import Stopped
from tests.support.agents.scripted_agents import (
    Counter,
    KeepingRewards,
    OneProblem,
    ScriptedBatcher,
    agent_runner,
    toolbox_of,
)
from tests.support.trainer.configs import config as config_of


@pytest.fixture
def config() -> Config:
    return config_of("model", batch={"groups": 1, "samples_per_group": 2})


@dataclass
class Asked:
    """A state of one's own."""

    answers: list[str]


class TwoCalls:
    """Calls `add` twice without freezing anything, then answers once."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        for number in (1, 2):
            await ctx.call("add", {"a": number, "b": 1})
        return await SingleTurn().run(ctx)


class TwoFrozenCalls:
    """The same with a state."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        state = ctx.frozen(Asked) or Asked([])
        while len(state.answers) < 2:
            answer = await ctx.call("add", {"a": len(state.answers) + 1, "b": 1})
            state.answers.append(answer.text)
            ctx.freeze(state)
        return await SingleTurn().run(ctx)


@pytest.mark.parametrize("loop", [TwoCalls(), TwoFrozenCalls()], ids=["replayed", "frozen"])
@pytest.mark.parametrize("idempotent", [True, False])
def test_answered_calls_are_not_made_again(config: Config, loop: Any, idempotent: bool) -> None:
    begun: list[UnfinishedGroup] = []
    held = []

    async def stop() -> None:
        held.append(None)
        if len(held) == 3:
            begun.append(runner.groups.progress[1].begun())
            raise Stopped

    first, second = Counter(idempotent=idempotent, hold=stop), Counter(idempotent=idempotent)
    runner = agent_runner(config, loop, toolbox_of(first), ScriptedBatcher(["4"]), KeepingRewards())
    with pytest.raises(Stopped):
        asyncio.run(runner.run(1))
    runner = agent_runner(config, loop, toolbox_of(second), ScriptedBatcher(["4"]), KeepingRewards())
    rows = asyncio.run(runner.run(1, begun[0]))
    assert [row.reward for row in rows] == [1.0, 1.0]
    known = sum(call.text is not None for each in begun[0].loops.values() for call in each.calls.values())
    open_calls = sum(call.text is None for each in begun[0].loops.values() for call in each.calls.values())
    assert known and open_calls and len(second.calls) == 4 - known - (0 if idempotent else open_calls)


class Asking:
    """Asks for one response with a bound of its own, then answers as one response does."""

    def __init__(self, most: int | None) -> None:
        self.most = most

    async def run(self, ctx: AgentContext) -> Trajectory:
        await ctx.generate(ctx.prompt.ids, max_tokens=self.most)
        return await SingleTurn().run(ctx)


@pytest.mark.parametrize(("most", "asked"), [(3, 3), (64, 64), (1000, 64), (None, 64)])
def test_a_loop_can_ask_for_fewer_tokens_but_not_for_more(config: Config, most: int | None, asked: int) -> None:
    batcher = ScriptedBatcher(["4", "4"])
    runner = agent_runner(config, Asking(most), toolbox_of(Counter()), batcher, KeepingRewards(), max_tokens=64)
    asyncio.run(runner.run(1))
    first = [request for request, *_ in batcher.asked if request.request_id.endswith("-0")]
    assert [request.sampling.max_tokens for request in first] == [asked, asked]


class Growing:
    """Asks for one response after the other, each to all tokens so far; the samples begin with different lengths."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        ids, results = [*ctx.prompt.ids], []
        for _ in range(3 if ctx.sample_index else 1):
            results.append(await ctx.generate(ids))
            ids += results[-1].response_ids
        return await finish(ctx, results, [[]] * len(results))


def test_a_prompt_without_room_for_a_response_fails_its_sample_alone(config: Config) -> None:
    batcher = ScriptedBatcher(["4", "4", "4"])
    toolbox = toolbox_of(Counter())
    length = len(OneProblem(toolbox, 64).drawn.ids) + 2 * len(batcher.ids(0))
    runner = agent_runner(config, Growing(), replace(toolbox, max_model_len=length), batcher, KeepingRewards())
    fine, full = asyncio.run(runner.run(1))
    assert fine.status == "ok" and full.status == "failed" and runner.groups.stats.overflows == 1
    assert full.failure.startswith("the prompt of request 2 of sample 1:1 has ") and str(length) in full.failure
    runner = agent_runner(config, Growing(), replace(toolbox, max_model_len=length + 1), batcher, KeepingRewards())
    assert [row.status for row in asyncio.run(runner.run(1))] == ["ok", "ok"]


def test_a_request_beyond_the_turns_of_the_config_fails_its_sample_alone(config: Config) -> None:
    for bounds, message in ({"max_turns": 2}, "sample 1:1 has made 2 requests"), ({}, ""):
        batcher = ScriptedBatcher(["4", "4", "4"])
        runner = agent_runner(config, Growing(), toolbox_of(Counter(), **bounds), batcher, KeepingRewards())
        fine, other = asyncio.run(runner.run(1))
        assert fine.status == "ok" and (other.failure.startswith(message) if message else other.status == "ok")


def test_a_loop_that_never_ends_is_ended_without_a_setting(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "LOOP_TURNS", 2)
    runner = agent_runner(config, Growing(), toolbox_of(Counter()), ScriptedBatcher(["4", "4", "4"]), KeepingRewards())
    _, other = asyncio.run(runner.run(1))
    assert other.failure.startswith("sample 1:1 has made 2 requests")


def test_a_call_that_must_not_be_repeated_is_recorded_on_the_disk_before_it_is_made(config: Config) -> None:
    written: list[tuple[int, list[str | None]]] = []

    async def persist(group: int) -> None:
        calls = runner.groups.progress[group].loops[0].calls
        written.append((len(tool.calls), [call.text for call in calls.values()]))

    tool = Counter(idempotent=False)
    one = config.model_copy(update={"batch": config.batch.model_copy(update={"samples_per_group": 1})})
    runner = agent_runner(one, TwoCalls(), toolbox_of(tool), ScriptedBatcher(["4"]), KeepingRewards())
    runner.groups.persist = persist  # type: ignore[method-assign]
    asyncio.run(runner.run(1))
    assert written == [(0, [None]), (1, ["2", None])]
    tool.idempotent = True
    written.clear()
    asyncio.run(runner.run(1))
    assert not written


def test_the_journal_holds_an_answer_as_the_model_sees_it(config: Config) -> None:
    """Another process answers the call from there, with the same tokens."""
    seen: list[tuple[str, str | None]] = []

    class Keeps:
        async def run(self, ctx: AgentContext) -> Trajectory:
            for name in ("add", "s" * 500):
                answer = await ctx.call(name, {"a": 1, "b": 1})
                *_, call = runner.groups.progress[1].loops[ctx.sample_index].calls.values()
                seen.append((answer.text, call.text))
            return await SingleTurn().run(ctx)

    box = toolbox_of(Counter(answer=lambda _: "a" * 500), max_tool_output_chars=64)
    runner = agent_runner(config, Keeps(), box, ScriptedBatcher(["4"]), KeepingRewards())
    asyncio.run(runner.run(1))
    assert len(seen) >= 2 and all(message == kept and 64 < len(message) < 128 for message, kept in seen)


def test_a_tool_that_does_not_keep_its_time_is_given_up(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "GRACE_S", 0.0)
    answers = []

    class Patient:
        async def run(self, ctx: AgentContext) -> Trajectory:
            answers.append(await ctx.call("add", {"a": 1, "b": 1}))
            return await SingleTurn().run(ctx)

    tool = Counter(hold=asyncio.Event().wait)
    box = toolbox_of(tool, tool_timeout_s=0.01)
    asyncio.run(agent_runner(config, Patient(), box, ScriptedBatcher(["4"]), KeepingRewards()).run(1))
    assert all(answer.error and "has not answered within 0.01 s" in answer.text for answer in answers)


def test_a_state_of_another_loop_and_a_lost_turn_are_reported(config: Config) -> None:
    class Lost:
        async def run(self, ctx: AgentContext) -> Trajectory:
            ctx.finished(3)
            raise AssertionError

    class Other:
        async def run(self, ctx: AgentContext) -> Trajectory:
            ctx.frozen(Asked)
            raise AssertionError

    runner = agent_runner(config, Lost(), toolbox_of(), ScriptedBatcher(["4"]), KeepingRewards())
    with pytest.raises(RolloutError, match=r"sample 1:\d should continue after turn 3"):
        asyncio.run(runner.run(1))
    runner = agent_runner(config, Other(), toolbox_of(), ScriptedBatcher(["4"]), KeepingRewards())
    kept = UnfinishedGroup(loops={index: FrozenLoop('{"something": 1}') for index in range(2)})
    with pytest.raises(RolloutError, match="the frozen state of a loop is not a Asked"):
        asyncio.run(runner.run(1, kept))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (TimeoutError("its own"), "the tool 'add' failed: TimeoutError: its own"),
        (KeyError("x"), "the tool 'add' failed: KeyError"),
        ("4", "the tool 'add' has to return a ToolAnswer, not str"),
    ],
)
def test_a_tool_that_fails_by_itself_is_reported(config: Config, answer: Any, message: str) -> None:
    class Broken(Counter):
        async def call(self, arguments: Any, *, timeout_s: float) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    box = toolbox_of(Broken(idempotent=True))
    runner = agent_runner(config, TwoCalls(), box, ScriptedBatcher(["4"]), KeepingRewards())
    with pytest.raises(ToolFailed, match=message):
        asyncio.run(runner.run(1))
