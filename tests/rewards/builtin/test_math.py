r"""Math answers through math-verify, \boxed{} first."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards.builtin.math import _parse, canonical, compare, last_boxed, math
from megarl.rewards.types import RewardInput
from megarl.rewards.worker_pool import RewardPool
from tests.support.checkout import EXCERPTS
from tests.support.rewards.reward_pool import make_reward_pool, score_all

EXCERPT = EXCERPTS / "problems.jsonl"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{7}, no, \boxed{8}.", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ {a} + {b} }", "{a} + {b}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\\boxed{3}", "3"),  # escaped twice
        (r"\boxed{7} and then \boxed{8", "7"),  # the last one was cut
        (r"\boxed{7", None),
        (r"} \boxed{5}", "5"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@given(st.text(alphabet="{}\\boxed 1", max_size=60))
def test_last_boxed_never_raises_and_balances(text: str) -> None:
    content = last_boxed(text)
    assert content is None or content in text


@given(st.integers(1, 4000))
def test_unbalanced_boxes_have_no_content(n: int) -> None:
    assert last_boxed(r"\boxed{" * n) is None


def test_last_boxed_is_linear_on_a_degenerate_response() -> None:
    """Two million characters take a fraction of a second; in quadratic time the test would not end for days."""
    assert last_boxed(r"\boxed{" * 300_000) is None


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{27}", "27.0", 1.0),
        (r"\boxed{27.0}", "27", 1.0),
        (r"\boxed{28}", "27", 0.0),
        (r"The answer is 27.", "27", 1.0),
        (r"First 27, so the answer is \boxed{28}.", "27", 0.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{72}", "He has 2*36=72\n#### 72", 1.0),  # GSM8K's own answers work too
        (r"\boxed{5}", r"Thus $x=\boxed{5}$.", 1.0),  # a worked solution as the reference
        (r"\boxed{5}", "$5$", 1.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        ("no idea", "27", 0.0),
        ("", "27", 0.0),
    ],
)
def test_equivalence(response: str, answer: str, score: float) -> None:
    assert math(RewardInput("", response, answer=answer)).score == score


def test_components() -> None:
    def components(response: str, **kwargs: bool) -> tuple[float, ...]:
        result = math(RewardInput("", response, answer="27"), **kwargs).components
        return result["correct"], result["parsed"], result["boxed"]

    assert components(r"\boxed{27}") == (1.0, 1.0, 1.0)
    assert components("it is 27") == (1.0, 1.0, 0.0)
    assert components("it is 27", require_box=True) == (0.0, 0.0, 0.0)
    assert components("no idea") == (0.0, 0.0, 0.0)
    assert components(r"\boxed{}") == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        (
            "1/2",
            [r"\boxed{\frac{1}{2}}", r"\boxed{\frac12}", r"\boxed{0.50}", r"it is $x = \frac{1}{2}$", r"\boxed{.5}"],
        ),
        ("3/2", [r"\boxed{\frac{3}{2}}", r"so $x=\frac{3}{2}$", r"\boxed{1.5}"]),
        ("x**2", [r"\boxed{x^2}", r"\boxed{x ^ {2}}"]),
        ("1234", [r"\boxed{1,234}", r"\boxed{1234.0}", "The answer is 1234."]),
        ("{1, 2}", [r"\boxed{\{1,2\}}", r"\boxed{\{2, 1\}}"]),
        ("9" * 5000, [rf"\boxed{{{'9' * 5000}}}"]),  # more digits than Python writes
        (None, ["no idea", r"\boxed{}", ""]),
    ],
)
def test_equal_answers_vote_alike_and_others_apart(answer: str | None, responses: list[str]) -> None:
    assert {math(RewardInput("", response, answer="7")).answer for response in responses} == {answer}


def test_the_same_answer_of_a_group_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    calls = []
    verify = math_verify.verify
    monkeypatch.setattr(math_verify, "verify", lambda *args, **kwargs: calls.append(args) or verify(*args, **kwargs))
    compare.cache_clear()
    for thought, content in [("a", "1/2"), ("b", "1/2"), ("c", "1/3"), ("d", "1/2"), ("e", "1/3")]:
        result = math(RewardInput(prompt="", response=rf"{thought} \boxed{{{content}}}", answer="0.5"))
        assert result.score == float(content == "1/2")
    assert len(calls) == 2


def test_a_reference_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be read by math-verify"):
        math(RewardInput("", r"\boxed{1}", answer=""))


def test_outside_the_main_thread() -> None:
    """math-verify's own time-out raises there."""
    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.append(math(RewardInput("", r"\boxed{\frac{6}{2}}", answer="3")).score)
    )
    thread.start()
    thread.join(timeout=60)
    assert scores == [1.0]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    pool = make_reward_pool("math", timeout_s=3.0)
    yield pool
    pool.close()


def test_the_excerpts_own_answers_are_right() -> None:
    for line in EXCERPT.read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert math(RewardInput("", rf"Hence \boxed{{{answer}}}", answer=answer)).score == 1.0


def test_the_full_files_own_answers_are_right(pool: RewardPool) -> None:
    if "MEGARL_DATA" not in os.environ:
        pytest.skip("MEGARL_DATA is not set: the full AIME and AMC files are not here")
    for name, rows in (("aime24", 30), ("amc23", 40)):
        lines = (Path(os.environ["MEGARL_DATA"]) / "math" / f"{name}.jsonl").read_text().splitlines()
        answers = [str(json.loads(line)["answer"]) for line in lines]
        samples = [RewardInput("", rf"Hence \boxed{{{a}}}", answer=a) for a in answers]
        assert [o.score for o in score_all(pool, samples)] == [1.0] * rows


@settings(deadline=None, max_examples=60)
@given(st.integers(-(10**15) + 1, 10**15 - 1), st.sampled_from([0, 0, 1, -1, 10, 1000, 10**14]))
def test_integers_are_compared_without_math_verify_and_as_it_does(number: int, apart: int) -> None:
    from math_verify import verify

    other = number + apart
    answer = rf"\boxed{{{number}}}"
    found, expected = _parse(answer), _parse(rf"\boxed{{{other}}}")
    theirs = (canonical(found), bool(verify(expected, found, timeout_seconds=None)))
    assert compare(str(other), answer) == theirs == (str(number), apart == 0)


def test_integers_that_are_written_in_another_way_are_left_to_math_verify() -> None:
    assert compare("7", r"\boxed{07}") == ("7", True)
    assert compare("1000", r"\boxed{1,000}")[1]
    assert compare("7", r"\boxed{7.0}")[1]
