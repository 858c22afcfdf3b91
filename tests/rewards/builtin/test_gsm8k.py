"""The number that a GSM8K response gives is found, and compared exactly."""

import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.builtin.gsm8k import final_number, gsm8k
from megarl.rewards.types import RewardInput
from tests.support.checkout import EXCERPTS

EXCERPT = EXCERPTS / "gsm8k.jsonl"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 16 - 3 - 4 = 9\n#### 18", "18"),
        ("####18", "18"),
        ("#### 18 eggs in 2 days", "18"),  # the first one after the mark
        ("#### 7\nno, wait\n#### 8", "8"),  # the last mark
        ("#### $1,234.50", "1234.5"),
        ("#### **1,234,567**", "1234567"),
        ("The answer is 72.", "72"),
        ("first 3, then 4", "4"),
        ("it costs $5.", "5"),
        ("it costs \\$5,000", "5000"),
        ("it is 40%", "40"),
        ("it is 40\\%.", "40"),
        ("5 dollars and 18kg", "18"),
        ("x = -5", "-5"),
        ("#### -5", "-5"),
        ("#### \u22125", "-5"),  # typographic minus
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### -1,000", "-1000"),
        ("10-5", "5"),  # a subtraction, not a negative number
        ("between 3-5", "5"),
        ("(10)-5", "5"),
        ("0.50", "1/2"),
        (".5", "1/2"),
        ("3.0", "3"),
        ("1/2", "1/2"),
        ("5/0", "5"),
        ("1,2,3", "3"),  # a list, not a thousand
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("10,000 and 2,000.25", "2000.25"),
        ("1{,}000", "1000"),
        ("10\\,000", "10000"),
        ("12\u202f345", "12345"),
        ("10 000", "10000"),
        ("1 234 567.5", "1234567.5"),
        ("it costs $10 000.", "10000"),
        ("1'000", "1000"),
        ("1\u2019234\u2019567", "1234567"),
        ("10_000", "10000"),
        ("#### 12 500 dollars", "12500"),
        ("-12 500", "-12500"),
        ("1 0000", "0"),  # not three digits
        ("1 00", "0"),
        ("1234 567", "567"),  # no group of at most three
        ("0 500", "500"),
        ("1\n000", "0"),  # another line
        ("1  000", "0"),
        ("1'000_000", "0"),  # two kinds
        ("1'0000", "0"),
        ("2 100-gram bags", "100"),  # no thousands before a unit
        ("2 100ml bottles", "100"),
        ("1.5 200", "200"),
        ("3, 100", "100"),
        ("#### - 5", "-5"),
        ("#### - $5.50", "-5.5"),
        ("#### **- 5**", "-5"),
        ("10 - 5", "5"),
        ("#### 10 - 5", "10"),
        ("3 1/2", "7/2"),
        ("-3 1/2", "-7/2"),
        ("#### 3 1/2 cups", "7/2"),
        ("#### - 3 1/2", "-7/2"),
        ("12 3/2", "3/2"),  # no mixed number
        ("650 000/2", "325000"),
        ("17 400/5", "3480"),
        ("5 1/0", "1"),
        ("\\frac{1}{2}", "1/2"),
        ("\\dfrac{3}{4}", "3/4"),
        ("\\tfrac { 10 } { 4 }", "5/2"),
        ("$x = -\\frac{1}{2}$", "-1/2"),
        ("\\frac{-1}{2}", "-1/2"),
        ("3\\frac{1}{2}", "7/2"),
        ("-3 \\dfrac{1}{2}", "-7/2"),
        ("\\frac{1,000}{3}", "1000/3"),
        ("\\frac{x}{2}", "2"),  # no number; as before
        ("#### none, though 4 was close", "4"),
        ("7 ####", "7"),  # nothing after the mark: the last number there is
        ("no number", None),
        ("", None),
        ("9" * 5000, None),  # Python refuses to read it; it is no answer either
    ],
)
def test_final_number(text: str, expected: str | None) -> None:
    assert final_number(text) == (None if expected is None else Fraction(expected))


def test_score_and_components() -> None:
    worked = "He has 2*3=<<2*3=6>>6 apples.\n#### 6"
    right = gsm8k(RewardInput("", "That makes 6.0 apples", answer=worked))
    assert (right.score, right.components) == (1.0, {"correct": 1.0, "parsed": 1.0})
    assert right.answer == "6"
    wrong = gsm8k(RewardInput("", "That makes 7", answer=worked))
    assert (wrong.score, wrong.components) == (0.0, {"correct": 0.0, "parsed": 1.0})
    silent = gsm8k(RewardInput("", "I do not know", answer=worked))
    assert (silent.score, silent.components) == (0.0, {"correct": 0.0, "parsed": 0.0})
    assert silent.answer is None
    with pytest.raises(ValueError, match="has no number"):
        gsm8k(RewardInput("", "6", answer="six"))


@given(st.integers(-(10**12), 10**12), st.sampled_from(("{}", "{:,}", "{}.", "{}.00", "{:,} miles", "{}%")))
def test_every_integer_is_read_however_it_is_written(value: int, style: str) -> None:
    for text in (f"so it is {style.format(value)}", f"1 + 1 = 2 #### {style.format(value)}"):
        assert final_number(text) == value


GROUPED = {" ": " ", "'": "'", "\u2019": "\u2019", "_": "_", "thin": "\u2009", "fixed": "\u00a0", "LaTeX": "{,}"}
ENDS = ("", ".", ".50", "%", " miles")


@given(st.integers(-(10**12), 10**12), st.sampled_from(sorted(GROUPED)), st.sampled_from(ENDS))
def test_every_integer_is_read_however_it_is_grouped(value: int, style: str, end: str) -> None:
    text = f"{value:,}".replace(",", GROUPED[style]) + end
    expected = Fraction(f"{value}.50" if end == ".50" else value)
    assert final_number(f"so it is {text}") == expected
    assert final_number(f"1 + 1 = 2 #### {text}") == expected


@given(st.booleans(), st.integers(0, 10**6), st.integers(1, 99), st.integers(1, 999), st.sampled_from(("", "d", "t")))
def test_every_fraction_is_read_however_it_is_written(
    negative: bool, whole: int, part: int, parts: int, kind: str
) -> None:
    sign = "-" if negative else ""
    for fraction in (f"{part}/{parts}", rf"\{kind}frac{{{part}}}{{{parts}}}"):
        value = Fraction(part, parts)
        assert final_number(f"so {sign}{fraction}.") == (-value if negative else value)
        if part < parts:
            assert final_number(f"#### {sign}{whole} {fraction}") == (-1 if negative else 1) * (whole + value)


@given(st.text(alphabet="0123456789.,-/#$ {}\\%x\n'_frac", max_size=40))
def test_any_text_gives_a_number_or_none(text: str) -> None:
    value = final_number(text)
    assert value is None or isinstance(value, Fraction)
    assert value is None or any(character.isdigit() for character in text)


def test_the_excerpts_own_answers_are_right() -> None:
    for line in EXCERPT.read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert gsm8k(RewardInput("", answer, answer=answer.rpartition("####")[2])).score == 1.0


def test_the_full_files_own_answers_are_right() -> None:
    if "MEGARL_DATA" not in os.environ:
        pytest.skip("MEGARL_DATA is not set: the full GSM8K files are not here")
    for name, rows in (("train", 7473), ("test", 1319)):
        lines = (Path(os.environ["MEGARL_DATA"]) / "gsm8k" / f"{name}.jsonl").read_text().splitlines()
        assert len(lines) == rows
        answers = [json.loads(line)["answer"] for line in lines]
        scores = [gsm8k(RewardInput("", a, answer=a.rpartition("####")[2])).score for a in answers]
        assert scores == [1.0] * rows
        # The last number of the worked answer without its mark is the same number nearly always.
        unmarked = [final_number(a.rpartition("####")[0]) == final_number(a) for a in answers]
        assert sum(unmarked) > 0.9 * rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The volume is \\boxed{18\\text{ cm}^3}.", "18"),
        ("<answer>30</answer> after 4 steps", "30"),
        ("\\boxed{30 = 5\\times6}", "30"),
        ("\\boxed{3\\frac12}", "7/2"),
        ("#### ３０", "30"),
        ("#### \u201330", "-30"),
        ("#### 12\u2007000", "12000"),
        ("#### 12\u200b000", "12000"),
        ("#### 12，000", "12000"),
        ("The final answer is \\boxed{5}. (See step 2.)", "5"),
        ("First \\boxed{4}, no: \\boxed{6}, which is 2 more.", "6"),
        ("\\boxed{x}, so 7", "7"),  # no number in the box
        ("#### 10 + 10 = 20", "20"),
        ("#### 4 × 5 = 20 eggs", "20"),
        ("#### 18 eggs in 2 days", "18"),
        ("\\boxed{3} \n#### 4", "4"),  # the mark counts before a box
    ],
)
def test_boxes_and_sums(text: str, expected: str) -> None:
    assert final_number(text) == Fraction(expected)


def test_only_what_follows_the_reasoning_is_judged() -> None:
    assert gsm8k(RewardInput("", "<think>7, or 8?</think>It is 7.", answer="7")).score == 1.0
    assert gsm8k(RewardInput("", "<think>It is 7", answer="7")).score == 0.0
    assert gsm8k(RewardInput("", "<think>It is 7", answer="7"), answer_after=None).score == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("#### 0.00003", "3e-05", 1.0),  # a number of a JSON file
        ("#### 5", "3e-05", 0.0),
        ("#### 10000000000000000", "1e+16", 1.0),
        ("#### 1.5e3", "1500", 1.0),
        (r"\boxed{1.5 \times 10^{3}}", "1500", 1.0),
        ("It is 2 × 10^3 grams.", "2000", 1.0),
        ("#### 4 × 5 = 20", "20", 1.0),
        ("#### 3 * 10 = 30", "30", 1.0),
        ("#### -2.5e-4", "-0.00025", 1.0),
        ("#### 2e", "2", 1.0),
    ],
)
def test_powers_of_ten(response: str, answer: str, score: float) -> None:
    assert gsm8k(RewardInput("", response, answer=answer)).score == score
