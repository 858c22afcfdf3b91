r"""The estimate of an answer's size: what sympy would work on for hours is found in milliseconds, real answers pass."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.answer_size import MAX_BITS, is_too_large
from megarl.rewards.math import math
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
    r"\binom{10^9}{5\cdot 10^8}",
    r"\frac{1}{9^{9^{9}}}",
    r"\sqrt{9^{9^{9}}}",
    r"x^{9^{9^9}}",
    r"9^{\frac{1}{1/10^9}}",
    r"e^{e^{e^{e^{10}}}}",
    r"{9^9}^{9^9}",
    r"3 + 2 \cdot 10^{10^7} - 1",
    "+".join(["1"] * 2000),
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
    r"2^{2^{10}}",
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
def test_what_is_too_large_is_found_at_once(text: str) -> None:
    begin = time.perf_counter()
    assert is_too_large(text)
    assert time.perf_counter() - begin < 1.0


@pytest.mark.parametrize("text", REAL, ids=lambda text: text[:30])
def test_real_answers_are_not_too_large(text: str) -> None:
    assert not is_too_large(text)


@pytest.mark.parametrize("text", TOO_LARGE[:9], ids=lambda text: text[:30])
@pytest.mark.parametrize("written", [r"\boxed{%s}", "The answer is $%s$."])
def test_the_verdict_is_fast_and_no_error(text: str, written: str) -> None:
    begin = time.perf_counter()
    assert math(RewardInput("", written % text, answer="3")).score == 0.0
    assert time.perf_counter() - begin < 30.0  # the import included; without the check it is hours


def test_a_large_answer_is_right_if_it_is_the_reference_itself() -> None:
    tower = r"9^{9^{9^9}}"
    assert math(RewardInput("", rf"\boxed{{ {tower} }}", answer=tower)).score == 1.0
    assert math(RewardInput("", r"\boxed{9^{9^{9^8}}}", answer=tower)).score == 0.0
    assert math(RewardInput("", r"\boxed{3}", answer=tower)).score == 0.0
    assert math(RewardInput("", "It is 3.", answer=tower)).score == 0.0


def test_a_large_number_in_the_working_does_not_hide_the_answer() -> None:
    response = r"As $9^{9^{9^9}}$ is odd, the answer is $3$."
    assert math(RewardInput("", response, answer="3")).score == 1.0


numbers = st.recursive(
    st.integers(0, 30).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "*", "**"]), inner).map(lambda each: f"({''.join(each)})"),
    max_leaves=6,
)


@given(numbers)
def test_no_number_that_passes_has_more_bits_than_the_limit(text: str) -> None:
    """The estimate is an upper bound: Python computes what passes, and only that."""
    if not is_too_large(text):
        assert abs(eval(text)).bit_length() <= MAX_BITS + 1


@given(st.text(alphabet=r"0123456789^!{}()[]\frac,+-*/ ex_.$", max_size=60))
def test_any_text_can_be_read(text: str) -> None:
    assert is_too_large(text) in (True, False)
