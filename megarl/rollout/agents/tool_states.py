"""The states of the tool agent and the transitions between them. Pure.

    generating -> parsing -> calling -> inserting -> generating -> ... -> done

A state holds everything but the sampled tokens, which the journal keeps. So a loop can continue from any state, in
another process too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.chat.tool_calls import MalformedCall, ParsedTurn
from megarl.common.values import changed
from megarl.config.schema.agent import TOOL_AGENT_TURNS, AgentConfig
from megarl.queue.trajectory import FinishReason
from megarl.tools.tool import ToolAnswer

AgentPhase = Literal["generating", "parsing", "calling", "inserting", "done"]


@dataclass(frozen=True)
class RequestedCall:
    """A call that the model asked for. `error`: why it cannot be made (the model gets it as answer), or empty."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    def content(self) -> dict[str, Any]:
        """Return the call as a reward function gets it."""
        return {"error": self.error} if self.error else {"name": self.name, "arguments": dict(self.arguments)}


@dataclass(frozen=True)
class Round:
    """The calls of a turn, their answers, and the tokens inserted between that turn and the next one."""

    calls: tuple[RequestedCall, ...]
    answers: tuple[ToolAnswer, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ToolAgentState:
    """The progress of one trajectory.

    `turns`: the number of ended turns. `calls` and `answers`: of the last turn; earlier ones are in `rounds`. `end` and
    `failure`: how the trajectory ended, in `done`; `overflow`: it ended because the answers did not fit.
    """

    phase: AgentPhase = "generating"
    turns: int = 0
    calls: tuple[RequestedCall, ...] = ()
    answers: tuple[ToolAnswer, ...] = ()
    rounds: tuple[Round, ...] = ()
    malformed: int = 0
    end: FinishReason = "stop"
    failure: str = ""
    overflow: bool = False


@dataclass(frozen=True)
class TurnEnded:
    """A response has ended. `empty`: without a token. `failure`: the reason of an aborted one."""

    finish_reason: FinishReason
    empty: bool = False
    failure: str = ""


@dataclass(frozen=True)
class AnswersEncoded:
    """The tokens of all answers. `fit`: the trajectory has room for them and at least one token of the next turn."""

    token_ids: tuple[int, ...]
    fit: bool


# `ParsedTurn`: the last turn was parsed. `ToolAnswer`: the next call was answered.
AgentEvent = TurnEnded | ParsedTurn | ToolAnswer | AnswersEncoded


def after(state: ToolAgentState, event: AgentEvent, bounds: AgentConfig) -> ToolAgentState:
    """Return the state after an event. Raises ValueError for an event that cannot happen in the state."""
    if state.phase == "generating" and isinstance(event, TurnEnded):
        return _after_turn(state, event)
    if state.phase == "parsing" and isinstance(event, ParsedTurn):
        return _after_reading(state, event, bounds)
    if state.phase == "calling" and isinstance(event, ToolAnswer):
        answers = (*state.answers, event)
        return changed(state, answers=answers, phase="inserting" if len(answers) == len(state.calls) else "calling")
    if state.phase == "inserting" and isinstance(event, AnswersEncoded):
        return _after_encoding(state, event, bounds)
    raise ValueError(f"{type(event).__name__} cannot happen while the tool agent is {state.phase}")


def _after_turn(state: ToolAgentState, event: TurnEnded) -> ToolAgentState:
    turns = state.turns + (not event.empty)
    if event.finish_reason == "stop" and not event.empty:
        return changed(state, phase="parsing", turns=turns)
    # A response without tokens is not a turn: the trajectory ends with the turn before, if there is one.
    failure = event.failure or ("empty response" if event.empty and not turns else "")
    end: FinishReason = "length" if event.finish_reason == "stop" else event.finish_reason
    return changed(state, phase="done", turns=turns, end=end, failure=failure)


def _after_reading(state: ToolAgentState, turn: ParsedTurn, bounds: AgentConfig) -> ToolAgentState:
    calls = tuple(
        RequestedCall(error=call.error) if isinstance(call, MalformedCall) else RequestedCall(call.name, call.arguments)
        for call in turn.calls[: bounds.max_calls_per_turn]
    )
    malformed = state.malformed + sum(bool(call.error) for call in calls)
    read = changed(state, calls=calls, malformed=malformed)
    if not calls or malformed > bounds.max_malformed_calls:
        return changed(read, phase="done", end="stop")
    if state.turns >= (bounds.max_turns or TOOL_AGENT_TURNS):
        return changed(read, phase="done", end="length")
    return changed(read, phase="calling")


def _after_encoding(state: ToolAgentState, event: AnswersEncoded, bounds: AgentConfig) -> ToolAgentState:
    if event.fit:
        done = Round(state.calls, state.answers, event.token_ids)
        return changed(state, phase="generating", rounds=(*state.rounds, done), calls=(), answers=())
    failure = ""
    if bounds.on_overflow == "fail":
        failure = f"{len(event.token_ids)} tokens of tool answers do not fit into the trajectory (agent.on_overflow)"
    return changed(state, phase="done", end="length", failure=failure, overflow=True)
