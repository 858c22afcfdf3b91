"""Every transition of the tool agent: whatever happens, it ends, within its bounds."""

import random
from dataclasses import replace

import msgspec
import pytest

from megarl.chat.tool_calls import MalformedCall, ParsedTurn, ToolCall
from megarl.config.schema.agent import AgentConfig
from megarl.rollout.agents.tool_states import (
    AgentEvent,
    AnswersEncoded,
    RequestedCall,
    Round,
    ToolAgentState,
    TurnEnded,
    after,
)
from megarl.tools.tool import ToolAnswer

BOUNDS = AgentConfig(max_turns=3, max_malformed_calls=1)
GOOD, BAD = ToolCall("f", {"x": 1}), MalformedCall("{", "no JSON")
CALLING = ToolAgentState("calling", turns=1, calls=(RequestedCall("f", {"x": 1}),))
ANSWER = ToolAnswer("4")
INSERTING = replace(CALLING, phase="inserting", answers=(ANSWER,))
STATES = [ToolAgentState(), ToolAgentState("parsing", turns=1), CALLING, INSERTING, ToolAgentState("done")]
EVENTS: list[AgentEvent] = [
    TurnEnded("stop"), ParsedTurn("4"), ANSWER, AnswersEncoded((1, 2), fit=True)
]  # fmt: skip


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.phase)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_each_state_takes_exactly_its_own_event(state: ToolAgentState, event: AgentEvent) -> None:
    if STATES.index(state) == EVENTS.index(event):
        assert after(state, event, BOUNDS).phase == ["parsing", "done", "inserting", "generating"][STATES.index(state)]
    else:
        with pytest.raises(ValueError, match=f"cannot happen while the tool agent is {state.phase}"):
            after(state, event, BOUNDS)


@pytest.mark.parametrize(
    ("turns", "event", "expected"),
    [
        (0, TurnEnded("length"), ToolAgentState("done", 1, end="length")),
        (0, TurnEnded("abort"), ToolAgentState("done", 1, end="abort")),
        (0, TurnEnded("length", empty=True), ToolAgentState("done", 0, end="length", failure="empty response")),
        (2, TurnEnded("length", empty=True), ToolAgentState("done", 2, end="length")),
        (2, TurnEnded("stop", empty=True), ToolAgentState("done", 2, end="length")),
        (
            2,
            TurnEnded("abort", empty=True, failure="3 replicas in a row were lost"),
            ToolAgentState("done", 2, end="abort", failure="3 replicas in a row were lost"),
        ),
    ],
)
def test_a_response_that_does_not_end_by_itself_ends_the_trajectory(
    turns: int, event: AgentEvent, expected: ToolAgentState
) -> None:
    assert after(ToolAgentState(turns=turns), event, BOUNDS) == expected


@pytest.mark.parametrize(
    ("turns", "malformed", "calls", "phase", "end"),
    [
        (1, 0, [], "done", "stop"),
        (1, 0, [GOOD, BAD], "calling", "stop"),
        (1, 1, [BAD], "done", "stop"),  # one too many that cannot be read
        (1, 1, [GOOD], "calling", "stop"),
        (3, 0, [GOOD], "done", "length"),  # no turn is left for the answer
    ],
)
def test_what_a_turn_says_decides(turns: int, malformed: int, calls: list, phase: str, end: str) -> None:
    state = after(ToolAgentState("parsing", turns, malformed=malformed), ParsedTurn("", tuple(calls)), BOUNDS)
    assert (state.phase, state.end, state.malformed) == (phase, end, malformed + calls.count(BAD))
    assert [call.error for call in state.calls] == [call.error if call is BAD else "" for call in calls]


@pytest.mark.parametrize(("most", "calls", "malformed"), [(None, 3, 1), (1, 1, 0), (2, 2, 1), (9, 3, 1)])
def test_calls_beyond_those_of_a_turn_are_not_looked_at(most: int | None, calls: int, malformed: int) -> None:
    bounds = AgentConfig(max_calls_per_turn=most)
    state = after(ToolAgentState("parsing", 1), ParsedTurn("", (GOOD, BAD, GOOD)), bounds)
    assert (state.phase, len(state.calls), state.malformed) == ("calling", calls, malformed)


def test_answers_that_do_not_fit_end_the_trajectory_before_them() -> None:
    event = AnswersEncoded((1, 2), fit=False)
    cut = after(INSERTING, event, BOUNDS)
    assert (cut.phase, cut.end, cut.failure, cut.overflow, cut.rounds) == ("done", "length", "", True, ())
    failed = after(INSERTING, event, AgentConfig(on_overflow="fail"))
    assert (failed.phase, failed.overflow) == ("done", True) and "2 tokens of tool answers do not fit" in failed.failure
    fitting = after(INSERTING, replace(event, fit=True), BOUNDS)
    assert fitting == ToolAgentState("generating", 1, rounds=(Round(CALLING.calls, (ANSWER,), (1, 2)),))


def random_event(state: ToolAgentState, rng: random.Random) -> AgentEvent:
    if state.phase == "generating":
        return TurnEnded(rng.choice(["stop", "stop", "stop", "length", "abort"]), empty=rng.random() < 0.1)
    if state.phase == "parsing":
        return ParsedTurn("", tuple(rng.choices([GOOD, GOOD, BAD], k=rng.randrange(4))))
    if state.phase == "calling":
        return ANSWER
    return AnswersEncoded((7,), fit=rng.random() < 0.9)


def test_every_course_ends_within_the_bounds_and_can_be_frozen_in_each_state() -> None:
    rng, ends = random.Random(1), set()
    for _ in range(2000):
        state = ToolAgentState()
        while state.phase != "done":
            assert msgspec.json.decode(msgspec.json.encode(state), type=ToolAgentState) == state
            state = after(state, random_event(state, rng), BOUNDS)
        assert state.turns <= BOUNDS.max_turns and len(state.rounds) <= state.turns
        assert state.failure == ("" if state.turns else "empty response")
        ends.add(state.end)
    assert ends == {"stop", "length", "abort"}
