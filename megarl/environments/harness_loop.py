"""The agent loop of a harness: the user's function acts through the gateway, and its session becomes the trajectories.

A harness is any program that speaks OpenAI's chat completions. Training uses what the gateway records in its session:
exact tokens, log-probs and versions, with a row for each path of turns.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.common.errors import RolloutError, ToolFailed
from megarl.common.imports import imported
from megarl.common.trust.secret_references import resolved
from megarl.config.schema.agent import LOOP_TURNS, AgentConfig
from megarl.environments.gateway_client import AttemptLost, GatewayClient, GatewayLost, wait_for_gateway
from megarl.environments.session_rows import SessionRow, SessionTurn, session_rows
from megarl.gateway.request_fields import RUN_SESSIONS, SessionTerms
from megarl.queue.images import ImageRef
from megarl.queue.trajectory import Trajectory
from megarl.rewards.registry import as_result
from megarl.rewards.types import RewardResult, Turn
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.trajectory_builder import defect, failed_trajectory, row_of
from megarl.rollout.engine.messages import GenerateResult

logger = logging.getLogger(__name__)

# `act(base_url, token, session, row)` returns the sample's reward, or None to use the reward function.
Act = Callable[..., Awaitable[float | RewardResult | None]]


class SampleFailed(Exception):  # noqa: N818
    """`act` raises it with the reason why its sample cannot be used; the group's other samples still can."""


@dataclass(frozen=True)
class ActEnd:
    """How `act` ended. `reward`: what it returned, if anything; `failure`: why the sample cannot be used.

    `overflow`: it failed after the gateway refused a request at a bound; the trajectory ends before that.
    """

    reward: RewardResult | None = None
    failure: str = ""
    overflow: bool = False


# `act` must end within this share of the loop's grace after the group's deadline, because the session is read then.
GRACE_SHARE = 0.5
# How often to start a sample if the gateway dies; after that its group fails.
ATTEMPTS = 3


class Harness:
    """Runs `act` for each sample, in its own session."""

    def __init__(self, act: Act, timeout_s: float, attempts: int, *, name: str = "agent.act") -> None:
        """`timeout_s`: the time limit of `act`. `name`: of `act`, for messages.

        `attempts`: how often to start a sample if the gateway dies or `act` raises AttemptLost.
        """
        self._act, self._timeout_s, self._attempts, self._name = act, timeout_s, attempts, name

    @classmethod
    def of(cls, agent: AgentConfig) -> Harness:
        """Return the loop of a config. Raises ValueError with what is wrong with `agent.act`."""
        path = agent.act or ""
        found: Any = imported(path, "agent.act:")
        if not inspect.iscoroutinefunction(found):
            raise ValueError(f"agent.act: {path!r} must be an `async def act(base_url, token, session, row)`")
        kwargs = resolved(agent.kwargs, "agent.kwargs")
        try:
            inspect.signature(found).bind("", "", "", {}, **kwargs)
        except TypeError as error:
            raise ValueError(
                f"agent.act: {path!r} cannot be called with (base_url, token, session, row) and agent.kwargs: {error}"
            ) from error
        return cls(functools.partial(found, **kwargs), agent.act_timeout_s, ATTEMPTS)

    async def run(self, ctx: AgentContext) -> list[Trajectory]:
        """Act for one sample; start again in a new session if the gateway dies. See `AgentLoop.run`.

        Raises AttemptLost if every attempt was lost, and ToolFailed if `act` itself fails.
        """
        run_dir = ctx.toolbox.run_dir
        if run_dir is None:
            raise RolloutError("agent.loop: harness acts through the gateway of the run; set gateway.enabled: true")
        for attempt in range(1, self._attempts + 1):
            try:
                return await self._attempt(ctx, run_dir)
            except AttemptLost as error:
                if attempt == self._attempts:
                    reported = f"sample {ctx.group_id}:{ctx.sample_index} was started {attempt} times"
                    raise AttemptLost(f"{reported}; the last time {error}") from error
                logger.warning("sample %d:%d is started again: %s", ctx.group_id, ctx.sample_index, error)
                if isinstance(error, GatewayLost):
                    await wait_for_gateway(run_dir)
        raise AssertionError("there is at least one attempt")

    async def _attempt(self, ctx: AgentContext, run_dir: Path) -> list[Trajectory]:
        # Unique: an earlier attempt, or a dead controller, may have left a session of this sample.
        name = f"{_stem(ctx)}{uuid.uuid4().hex}"
        async with GatewayClient(run_dir) as gateway:
            await gateway.open(name, terms_of(ctx))
            try:
                end = await self._call(ctx, gateway, name)
                turns = await gateway.turns(name)
            finally:
                await gateway.end(name)
        ctx.note_end(turns=len(turns), overflow=end.overflow)
        return await trajectories(ctx, turns, end)

    async def _call(self, ctx: AgentContext, gateway: GatewayClient, name: str) -> ActEnd:
        """Run `act`, and return how it ended."""
        limit_s = self._timeout_s
        if ctx.deadline is not None:
            limit_s = min(limit_s, max(0.0, ctx.deadline.at - time.monotonic()) + GRACE_SHARE * ctx.deadline.grace_s)
        row = ctx.prompt.reward_input("", [], "stop").row
        sample = f"sample {ctx.group_id}:{ctx.sample_index}"
        try:
            async with asyncio.timeout(limit_s) as limit:
                return ActEnd(outcome_of(await self._act(gateway.base_url, gateway.token, name, row)))
        except AttemptLost:
            raise
        except Exception as error:
            if isinstance(error, SampleFailed):
                return ActEnd(failure=str(error))
            if isinstance(error, TimeoutError) and limit.expired():
                reported = f"{sample} waited {limit_s:.0f} s for {self._name} to end; its timeout can be raised"
                return ActEnd(failure=reported)
            refused = await gateway.refusal(name)  # raises GatewayLost if that is the cause
            reported = f"{self._name} failed in {sample}: {type(error).__name__}: {error}"
            if not refused:
                raise ToolFailed(reported) from error
            logger.info("%s; the gateway had refused a request: %s", reported, refused)
            fails = ctx.toolbox.bounds.on_overflow == "fail"
            return ActEnd(failure=f"{reported} (agent.on_overflow)" if fails else "", overflow=True)


def terms_of(ctx: AgentContext) -> SessionTerms:
    """Return the terms of a sample's session: the sampling of its set, its turns, and the deadline of its group.

    In training, the session replaces those that a dead attempt left in the gateway. In an evaluation it replaces none,
    because a greedy and a sampled response may have the same numbers at once.
    """
    most = ctx.toolbox.bounds.max_turns or LOOP_TURNS
    if not ctx.trains:
        return SessionTerms(ctx.prompt.sampling, ctx.seed, most_turns=most)
    deadline = None if ctx.deadline is None else ctx.deadline.sent(time.monotonic())
    prefix = f"group {ctx.group_id}"
    return SessionTerms(ctx.prompt.sampling, ctx.seed, prefix, deadline, replaces=_stem(ctx), most_turns=most)


def _stem(ctx: AgentContext) -> str:
    """Return the prefix of the names of a sample's sessions, unique among training samples."""
    return f"{RUN_SESSIONS}{ctx.group_id}-{ctx.sample_index}-"  # the last dash distinguishes sample 1 from 10


def outcome_of(returned: object) -> RewardResult | None:
    """Return what `act` has returned as a reward; None if the reward function has to give it. Raises ValueError."""
    if returned is None:
        return None
    try:
        return as_result("a bool" if isinstance(returned, bool) else returned)
    except ValueError as error:
        raise ValueError(f"it returned {returned!r}; return None, a finite number, or a RewardResult") from error


async def trajectories(ctx: AgentContext, turns: Sequence[SessionTurn], end: ActEnd) -> list[Trajectory]:
    """Return the trajectories of a session, which share one reward: that of `end`, or of judging the last turn.

    The sample fails if `end` has a failure, if a turn cannot be trained on, or if there is no turn.
    """
    rows, reward, failure = session_rows(turns), end.reward, end.failure
    if not rows:
        none = "no request was made in the session: send its name as X-Session-ID"
        failure = failure or ("the prompt of the first request has no room for a response" if end.overflow else none)
        return [failed_trajectory(ctx.group_id, ctx.sample_index, failure)]
    results = {turn.number: _result(turn) for turn in turns if turn.response_ids}
    failure = failure or next((found for each in results.values() if (found := defect(each))), "")
    last = max(results)
    if end.overflow:
        rows = [replace(row, finish_reason="length") if last in row.turns else row for row in rows]
    if not failure and reward is None:
        path = next(row for row in rows if last in row.turns)
        reward = await ctx.judge(results[last], dialogue_of(ctx, path, turns))
    if reward is not None and reward.dropped:
        failure = failure or reward.error or ""
    failure = failure or _turns_that_do_not_fit(rows, reward)
    return [_trajectory(ctx, row, reward, failure) for row in rows]


def dialogue_of(ctx: AgentContext, row: SessionRow, turns: Sequence[SessionTurn]) -> list[Turn]:
    """Return a path as reward functions get it; `turns`: of its session.

    Text between two turns of the model is listed message by message if it came from a chat. All of it is a `user`'s
    unless its role is `tool`: text that the model did not sample is never an assistant's.
    """
    by_number = {turn.number: turn for turn in turns}
    messages: list[tuple[int, tuple[str, str]]] = []  # with the response token at which its turn's new prompt begins
    calls: list[tuple[int, dict[str, Any]]] = []  # with the response token at which its turn begins
    known = 0
    for turn in (by_number[number] for number in row.turns):
        begin = len(turn.prompt_ids) - len(row.prompt_ids)
        messages += [(known, each) for each in turn.messages]
        calls += [(begin, each) for each in turn.calls]
        known = begin + len(turn.response_ids)
    listed, start = [], 0
    for by_model, tokens in itertools.groupby(row.sampled):
        end = start + len(list(tokens))
        ids, here = row.response_ids[start:end], range(start, end)
        if by_model:
            made = tuple(call for at, call in calls if at in here)
            listed.append(Turn("assistant", ctx.toolbox.dialogue.text(ids), len(ids), made))
        elif brought := [message for at, message in messages if at in here]:
            inserted = [Turn("tool" if role == "tool" else "user", text) for role, text in brought]
            listed += [*inserted[:-1], replace(inserted[-1], tokens=len(ids))]
        else:
            listed.append(Turn("user", ctx.toolbox.dialogue.text(ids), len(ids)))
        start = end
    return listed


def _result(turn: SessionTurn) -> GenerateResult:
    name = f"turn {turn.number}"
    return GenerateResult(name, turn.response_ids, turn.logprobs, turn.versions, turn.finish_reason, -1)


def _turns_that_do_not_fit(rows: Sequence[SessionRow], reward: RewardResult | None) -> str:
    """Return why it cannot be known of which turns the rewards of turns are; empty if they can, or there are none."""
    if reward is None or not reward.turn_rewards:
        return ""
    if len(rows) > 1:
        return f"the session has {len(rows)} paths, but turn_rewards need a session of one dialogue"
    turns, given = len(_turn_starts(rows[0])), len(reward.turn_rewards)
    return "" if given == turns else f"there are {given} turn_rewards, and the session has {turns} turns"


def _turn_starts(row: SessionRow) -> list[int]:
    """Return the first response token of each turn of the model."""
    return [at for at, (before, now) in enumerate(itertools.pairwise([0, *row.sampled])) if now and not before]


def _trajectory(ctx: AgentContext, row: SessionRow, reward: RewardResult | None, failure: str) -> Trajectory:
    result = GenerateResult("", row.response_ids, row.logprobs, row.versions, row.finish_reason, -1)
    if reward is not None and failure:
        reward = replace(reward, turn_rewards=())
    starts = _turn_starts(row)
    made = row_of(ctx.group_id, ctx.sample_index, row.prompt_ids, result, reward, failure, starts, row.mask)
    refs = tuple(ImageRef(each.hash, each.offset, each.height, each.width) for each in row.images)
    return replace(made, images=refs, files={each.hash: each.file for each in row.images})
