"""Sessions: every turn's prompt comes back exactly, whatever the tree; bounds; idle sessions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.gateway.request_fields import ApiError, SessionTerms
from megarl.gateway.sessions import (
    GatewaySession,
    Sessions,
    extended,
    keys_of,
    root_key,
)
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.messages import SamplingSpec
from megarl.rollout.engine.response_parts import ResponsePart

TOKENS = st.lists(st.integers(0, 3), max_size=4)


def part(ids: list[int], version: int = 0) -> ResponsePart:
    spans = (VersionSpan(version, 0, len(ids)),) if ids else ()
    return ResponsePart(ids, [-0.25 * each for each in ids], spans, "stop")


def begins(ids: list[int], beginning: list[int]) -> bool:
    return ids[: len(beginning)] == beginning


@given(st.lists(st.tuples(st.integers(0, 9), TOKENS, TOKENS), min_size=1, max_size=12))
def test_every_turn_of_a_tree_keeps_its_exact_tokens(turns: list[tuple[int, list[int], list[int]]]) -> None:
    """`turns`: what is continued (one of the turns before, or nothing), tokens added to the prompt, the response."""
    session, whole = GatewaySession("s", 0.0), []
    for number, (choice, added, response) in enumerate(turns):
        parent = choice if choice < number else None
        before = [] if parent is None else whole[parent][0] + whole[parent][1]
        prompt = before + added
        turn = session.record(prompt, part(response), parent=parent)
        whole.append((prompt, response))
        assert (turn.number, turn.parent) == (number, parent)
    for number, (prompt, response) in enumerate(whole):
        assert session.prompt_of(number) == prompt and session.ids_through(number) == prompt + response
        assert session.turns[number].logprobs.tolist() == [-0.25 * each for each in response]
    for number in range(len(whole)):
        query = [*session.ids_through(number), 9]
        found = session.continued_by(query)
        longest = max(
            len(prompt + response) for prompt, response in whole if query[: len(prompt + response)] == prompt + response
        )
        assert found is not None and len(session.ids_through(found.number)) == longest
        assert query[:longest] == session.ids_through(found.number)


def test_a_turn_must_begin_with_the_tokens_of_the_one_that_it_continues() -> None:
    session = GatewaySession("s", 0.0)
    session.record([1, 2], part([3]))
    with pytest.raises(ValueError, match="does not begin with the tokens of turn 0"):
        session.record([1, 2, 4, 5], part([3]), parent=0)
    with pytest.raises(ValueError, match="has not ended"):
        session.record([1, 2], ResponsePart([3], [0.0]))
    assert session.continued_by([1, 2]) is None and session.continued_by([2]) is None


def add(sessions: Sessions, name: str, tokens: int, now: float) -> None:
    with sessions.using(name, now) as session:
        sessions.count(session, session.record([5] * tokens, part([])), now)


def names(sessions: Sessions) -> list[str]:
    return list(sessions._sessions)


def test_unused_sessions_are_dropped_and_used_ones_are_not() -> None:
    sessions = Sessions(2, 100, idle_s=10.0)
    add(sessions, "a", 4, now=0.0)
    with sessions.using("b", 1.0):
        with pytest.raises(ApiError, match=r"there are 2 sessions, all used within 10 s"):
            add(sessions, "c", 1, now=9.0)
        assert sessions.expire(50.0) == ["a"] and sessions.tokens == 0  # b is in use
        add(sessions, "c", 1, now=51.0)
    assert names(sessions) == ["c"]  # b had no turn when its request ended
    sessions.end("c")
    for missing in (sessions.get, sessions.end):
        with pytest.raises(ApiError, match="no such session"):
            missing("c")
    assert sessions.tokens == 0


def test_too_many_tokens_are_refused_and_room_comes_back() -> None:
    sessions = Sessions(10, 8, idle_s=10.0)
    add(sessions, "a", 8, now=0.0)
    for name in ("a", "b"):
        with pytest.raises(ApiError, match="and may have 8"):
            add(sessions, name, 1, now=1.0)
    sessions.end("a")
    add(sessions, "b", 1, now=1.0)
    assert sessions.tokens == 1


def test_a_session_that_is_ended_while_a_turn_is_under_way_counts_nothing() -> None:
    sessions = Sessions(10, 100, idle_s=10.0)
    with sessions.using("a", 0.0) as session:
        sessions.end("a")
        sessions.count(session, session.record([1], part([2])), 1.0)
    assert sessions.tokens == 0 and len(sessions) == 0


def test_a_session_takes_the_place_of_those_that_an_attempt_before_has_left() -> None:
    sessions, terms = Sessions(3, 100, 10.0), SessionTerms(SamplingSpec(4, 1.0, (2,)))
    for name in ("sample-3-1-a", "sample-3-11-a", "sample-13-1-a"):
        sessions.open(name, terms, 0.0)
    add(sessions, "sample-3-1-a", 5, now=1.0)
    sessions.open("sample-3-1-b", SessionTerms(SamplingSpec(4, 1.0, (2,)), replaces="sample-3-1-"), 2.0)
    assert names(sessions) == ["sample-3-11-a", "sample-13-1-a", "sample-3-1-b"] and sessions.tokens == 0
    with pytest.raises(ApiError, match="there are 3 sessions"):
        sessions.open("sample-4-1-a", terms, 3.0)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "annotations": [], "audio": None},
        {"role": "assistant", "tool_calls": [
            {"id": "c1", "function": {"arguments": {"b": 2, "a": 1}, "name": "add"}, "type": "function"}]},
    ],
)  # fmt: skip
def test_forms_of_the_same_message_have_one_key(message: dict[str, object]) -> None:
    assert extended("k", message) == extended("k", {"role": "assistant", "content": None, "tool_calls": [CALL]})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "tool_calls": [{**CALL, "id": "c2"}]},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "user", "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "add", "arguments": "{}"}}]},
    ],
)
def test_other_messages_have_other_keys(message: dict[str, object]) -> None:
    assert extended("k", message) != extended("k", {"role": "assistant", "tool_calls": [CALL]})


def test_keys_depend_on_all_before_them() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    keys = keys_of(root_key([], {}), messages)
    assert len(keys) == 3 and len(set(keys)) == 3
    assert keys_of(root_key([{"x": 1}], {}), messages)[2] != keys[2]
    assert keys_of(root_key([], {}), [{"role": "user", "content": " a\\n"}, *messages[1:]])[0] == keys[0]
    assert keys_of(root_key([], {}), list(reversed(messages)))[2] != keys[2]
    assert extended(keys[1], messages[1]) == keys[2]


def test_a_session_that_was_opened_is_there_before_its_first_turn_and_is_forgotten_like_others() -> None:
    sessions, terms = Sessions(1, 100, 10.0), SessionTerms(SamplingSpec(4, 1.0, (2,)))
    sessions.open("a", terms, 0.0)
    with sessions.using("a", 1.0) as session:
        assert session.terms is terms
    assert sessions.get("a") is session, "a request that has failed does not end it"
    with pytest.raises(ApiError, match="session 'a' already exists"):
        sessions.open("a", terms, 2.0)
    with pytest.raises(ApiError, match="there are 1 sessions"):
        sessions.open("b", terms, 2.0)
    sessions.open("b", terms, 12.0)
    assert names(sessions) == ["b"]


def test_a_session_of_the_run_is_never_made_by_its_use() -> None:
    """A gateway that has taken another's place makes none, nor does the request that finds it unused for too long."""
    sessions, terms = Sessions(2, 100, 10.0), SessionTerms(SamplingSpec(4, 1.0, (2,)))
    with pytest.raises(ApiError, match="no such session"), sessions.using("megarl-3-1-a", 0.0):
        pass
    sessions.open("megarl-3-1-a", terms, 0.0)
    add(sessions, "megarl-3-1-a", 1, now=10.0)
    with pytest.raises(ApiError, match="no such session"), sessions.using("megarl-3-1-a", 21.0):
        pass
    assert len(sessions) == 0 and sessions.tokens == 0
    add(sessions, "megarl", 1, now=22.0)
    add(sessions, "a", 1, now=22.0)
    with pytest.raises(ApiError, match="no such session"), sessions.using("megarl-3-1-a", 23.0):
        pass  # not NoRoom, after which a client would try again
