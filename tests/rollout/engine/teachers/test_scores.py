"""The questions for a teacher, and the rows with its answers: every row comes back, and no other token is scored."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.queue.streams import TEACHER_LOGPROBS
from megarl.queue.trajectory import Trajectory
from megarl.rollout.engine.teachers.scores import score_requests, with_scores
from tests.support.rollout.scored_rows import row

ROWS = st.lists(
    st.builds(
        lambda tokens, kind: (tokens, kind), st.integers(1, 5), st.sampled_from(["ok", "failed", "demonstrated", "two"])
    ),
    min_size=1,
    max_size=6,
)


def made_of(kinds: list[tuple[int, str]]) -> list[Trajectory]:
    rows = []
    for index, (tokens, kind) in enumerate(kinds):
        if kind == "failed":
            rows.append(row(index, 0, tokens, status="failed", failure="aborted"))
        else:
            rows.append(row(index, 0, tokens, demonstrated=kind == "demonstrated"))
        if kind == "two":
            rows.append(row(index, 1, tokens + 1))
    return rows


@given(ROWS)
def test_each_usable_row_gets_its_own_values(kinds: list[tuple[int, str]]) -> None:
    rows = made_of(kinds)
    requests = score_requests(rows)
    asked = [each for each in rows if each.status == "ok" and not each.demonstrated]
    assert [each.token_ids[each.start :] for each in requests] == [each.response_ids for each in asked]
    assert [each.token_ids[: each.start] for each in requests] == [each.prompt_ids for each in asked]
    # A value that tells which row and token it is of.
    scores = [
        [-1.0 * (number + token / 8) for token in range(len(each.response_ids))] for number, each in enumerate(asked)
    ]
    back = with_scores(rows, scores, "big")
    assert [each.key for each in back] == [each.key for each in rows]
    found = [each.streams[TEACHER_LOGPROBS] for each in back if TEACHER_LOGPROBS in each.streams]
    assert found == [each for each in scores]
    assert [replace(each, streams={}) for each in back] == rows


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_log_prob_that_is_not_finite_fails_its_whole_sample_and_no_other(bad: float) -> None:
    rows = [row(0), row(1, 0), row(1, 1, 2), row(2)]
    back = with_scores(rows, [[-1.0] * 3, [-1.0] * 3, [-1.0, bad], [-1.0] * 3], "big")
    assert [each.status for each in back] == ["ok", "failed", "failed", "ok"]
    assert back[1].failure == back[2].failure == f"teacher big: log-prob {bad} of a response token"


def test_answers_of_another_number_are_refused() -> None:
    with pytest.raises(ValueError, match="teacher big answered 1 of 2 requests"):
        with_scores([row(0), row(1)], [[-1.0] * 3], "big")
    with pytest.raises(ValueError, match="sample 4:0: teacher big gave 2 log-probs for 3 response tokens"):
        with_scores([row(0)], [[-1.0] * 2], "big")
