"""The rows of a session: every sampled token is trained once, with what was recorded of it, and no other token is."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.environments.harness_loop import ActEnd, trajectories
from megarl.environments.session_rows import SessionTurn, read_turns, session_rows
from megarl.gateway.sessions import GatewaySession, session_content
from megarl.queue.trajectory import VersionSpan
from megarl.rewards.types import RewardResult
from megarl.rollout.engine.response_parts import ResponsePart


def recorded(turns: Sequence[tuple[int | None, Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """The answer to `GET /v1/sessions/ID` of turns (parent, inserted tokens, response), as JSON brings it."""
    session = GatewaySession("s", 0.0)
    for number, (parent, inserted, response) in enumerate(turns):
        cut = len(response) // 2
        spans = (VersionSpan(number, 0, cut), VersionSpan(number + 1, cut, len(response)))
        logprobs = [-(number + 1) / 8 - token / 64 for token in response]
        part = ResponsePart(
            list(response), logprobs, tuple(span for span in spans if span.end > span.start), "stop"
        )  # fmt: skip
        session.record([*session.ids_through(parent), *inserted], part, parent=parent)
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(session_content(session)))
    return content


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[int | None, list[int], list[int]]]:
    """Turns as (parent, inserted tokens, response); a response may be empty."""
    turns: list[tuple[int | None, list[int], list[int]]] = []
    for number in range(draw(st.integers(1, 7))):
        parent = draw(st.sampled_from([None, *range(number)]))
        inserted = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
        response = draw(st.lists(st.integers(10, 19), min_size=0 if draw(st.integers(0, 4)) == 0 else 1, max_size=4))
        turns.append((parent, inserted, response))
    return turns


@given(trees())
def test_every_sampled_token_is_trained_once_as_it_was_recorded(tree: list) -> None:
    session = recorded(tree)
    turns = read_turns(session)
    rows = session_rows(turns)
    seen: dict[int, int] = {}
    for row in rows:
        assert len(row.response_ids) == len(row.mask) == len(row.logprobs) == len(row.sampled)
        whole, start = [*row.prompt_ids, *row.response_ids], len(row.prompt_ids)
        for number in row.turns:
            turn = turns[number]
            begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids)
            assert whole[:end] == [*turn.prompt_ids, *turn.response_ids]
            mask = row.mask[begin - start : end - start]
            assert all(row.sampled[begin - start : end - start])
            assert len(set(mask)) <= 1
            if any(mask):
                seen[number] = seen.get(number, 0) + 1
                assert row.logprobs[begin - start : end - start] == turn.logprobs
                spans = [VersionSpan(s.version, s.start + begin - start, s.end + begin - start) for s in turn.versions]
                assert set(spans) <= set(row.versions)
        sampled = sum(len(turns[number].response_ids) for number in row.turns)
        assert sum(row.sampled) == sampled and len(whole) == len(turns[row.turns[-1]].prompt_ids) + len(
            turns[row.turns[-1]].response_ids
        )
        covered = [at for span in row.versions for at in range(span.start, span.end)]
        assert covered == [at for at, trained in enumerate(row.mask) if trained]
        assert all(value == 0.0 for value, trained in zip(row.logprobs, row.mask, strict=True) if not trained)
        assert any(row.mask) and row.finish_reason == turns[row.turns[-1]].finish_reason
    with_tokens = {turn.number for turn in turns if turn.response_ids}
    on_paths = {number for row in rows for number in row.turns}
    assert with_tokens <= on_paths and seen == dict.fromkeys(with_tokens, 1)
    inner = {turn.parent for turn in turns if turn.number in on_paths}
    assert [row.turns[-1] for row in rows] == sorted(with_tokens - inner)


def test_a_dialogue_that_branches_trains_what_is_shared_in_the_first_row() -> None:
    session = recorded([(None, [1, 2], [11]), (0, [3], [12, 13]), (0, [4], [14])])
    first, second = session_rows(read_turns(session))
    assert (first.turns, first.prompt_ids, first.response_ids) == ((0, 1), [1, 2], [11, 3, 12, 13])
    assert (first.mask, first.sampled) == ([1, 0, 1, 1], [1, 0, 1, 1])
    assert (second.turns, second.response_ids, second.mask) == ((0, 2), [11, 4, 14], [0, 0, 1])
    assert second.sampled == [1, 0, 1] and second.logprobs[:2] == [0.0, 0.0]


def test_turns_that_do_not_continue_their_parents_are_refused() -> None:
    part = ResponsePart([5], [-0.5], (VersionSpan(0, 0, 1),), "stop")
    turns = [
        SessionTurn(0, None, [1], part.response_ids, part.logprobs, part.versions, "stop"),
        SessionTurn(1, 0, [1, 6, 7], [8], [-0.5], part.versions, "stop"),
    ]
    with pytest.raises(ValueError, match="turn 1 does not continue the tokens of turn 0"):
        session_rows(turns)


def test_rewards_of_turns_are_for_a_session_of_one_dialogue() -> None:
    ctx: Any = SimpleNamespace(group_id=7, sample_index=1)
    reward = RewardResult(1.0, turn_rewards=(0.5, -0.5))
    tree = [(None, [1, 2], [11]), (0, [3], [12, 13])]
    turns = read_turns(recorded(tree))
    [row] = asyncio.run(trajectories(ctx, turns, ActEnd(reward)))
    assert (row.status, row.turn_rewards, row.turn_starts) == ("ok", [0.5, -0.5], [0, 2])
    [plain] = asyncio.run(trajectories(ctx, turns, ActEnd(RewardResult(1.0))))
    assert plain == replace(row, turn_rewards=[], turn_starts=[])
    [short] = asyncio.run(trajectories(ctx, turns, ActEnd(replace(reward, turn_rewards=(1.0,)))))
    assert short.status == "failed" and short.failure == "there are 1 turn_rewards, and the session has 2 turns"
    branched = asyncio.run(trajectories(ctx, read_turns(recorded([*tree, (0, [4], [14])])), ActEnd(reward)))
    assert [each.failure for each in branched] == [
        "the session has 2 paths, but turn_rewards need a session of one dialogue"
    ] * 2
