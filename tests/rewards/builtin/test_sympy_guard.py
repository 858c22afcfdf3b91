r"""The size of answers: what sympy would work on for hours is found, real answers pass."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.builtin.math import math
from megarl.rewards.builtin.sympy_guard import MAX_DIGITS, is_too_large
from megarl.rewards.types import RewardInput

TOO_LARGE = [
    r"9^{9^{9^9}}",
    r"10^{10^{10^{10}}}",
    "9^9^9^9",
    "9**9**9**9",
    "(10^8)!",
    r"\left(10^{8}\right)!",
    "1,000,000!",
    "((10!)!)!",
    "10!^{10!}",
    r"\{" + ",".join(map(str, range(4000))) + r"\}",
    r"\{" + ",".join(map(str, range(100, 999))) + r"\}",
    r"\frac{1}{9^{9^{9}}}",
    r"\sqrt{9^{9^{9}}}",
    r"x^{9^{9^9}}",
    r"{9^9}^{9^9}",
    r"3 + 2 \cdot 10^{10^7} - 1",
    r"\left(\frac{1}{2}\right)^{10^8}",
    "+".join(["1"] * 4000),
    r"\frac{1}{" * 40 + "2" + "}" * 40,
    "{" * 100_000,
    "9" * 100_000,
]
REAL = [
    "",
    "72",
    "-1,234.50",
    r"\frac12",
    r"\frac{3}{4}^{20}",
    r"2^{2024}",
    r"3\cdot 2^{1000}-1",
    "2024!",
    r"10^{10000}",
    r"2^{2^{16}}",
    r"10^{10^4}",
    r"2^{10} 3^{5}",
    "2^3 3^4",
    r"\binom{2024}{1012}",
    r"\binom{10^9}{2}",
    r"1000(1.005)^{360}",
    r"x^{2024} + 1",
    r"\sqrt[3]{5}+\sqrt{2}",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    r"(-\infty,3)\cup(5,\infty)",
    r"\{" + ", ".join(map(str, range(100))) + r"\}",
    r"\frac{1}{2^{2023}}",
    r"a!=b",
    r"90^\circ",
    r"-\frac{\pi}{6}",
    r"7\text{ apples!}",
    "9" * 5000,
    "}{)(^_!",
]


@pytest.mark.parametrize("text", TOO_LARGE, ids=lambda text: text[:30])
def test_what_is_too_large_is_found(text: str) -> None:
    assert is_too_large(text)


@pytest.mark.parametrize("text", REAL, ids=lambda text: text[:30])
def test_real_answers_are_not_too_large(text: str) -> None:
    assert not is_too_large(text)


@pytest.mark.parametrize("text", TOO_LARGE[:9], ids=lambda text: text[:30])
@pytest.mark.parametrize("written", [r"\boxed{%s}", "The answer is $%s$."])
def test_the_verdict_comes_and_is_no_error(text: str, written: str) -> None:
    assert math(RewardInput("", written % text, answer="3")).score == 0.0  # without the check it takes hours


def test_a_large_answer_is_right_if_it_is_the_reference_itself() -> None:
    tower = r"9^{9^{9^9}}"
    assert math(RewardInput("", rf"\boxed{{ {tower} }}", answer=tower)).score == 1.0
    assert math(RewardInput("", r"\boxed{9^{9^{9^8}}}", answer=tower)).score == 0.0
    assert math(RewardInput("", r"\boxed{3}", answer=tower)).score == 0.0
    assert math(RewardInput("", "It is 3.", answer=tower)).score == 0.0


def test_a_large_number_in_the_working_does_not_hide_the_answer() -> None:
    response = r"As $9^{9^{9^9}}$ is odd, the answer is $3$."
    assert math(RewardInput("", response, answer="3")).score == 1.0


@given(st.lists(st.integers(0, 30), min_size=2, max_size=4), st.booleans())
def test_no_tower_that_passes_has_more_digits_than_the_limit(levels: list[int], bracketed: bool) -> None:
    """Python computes what passes, and only that."""
    text = "**".join(map(str, levels))
    if bracketed:
        text = "**(".join(map(str, levels)) + ")" * (len(levels) - 1)
    if not is_too_large(text):
        assert eval(text).bit_length() <= (MAX_DIGITS + 1) * 4


@given(st.text(alphabet=r"0123456789^!{}()[]\frac,+-*/ ex_.$", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert is_too_large(text) in (True, False)
