"""The calculator's results, and that no expression costs it time or memory."""

import pytest

from examples.rl.tools.calculator import CalculationError, Calculator, calculate
from megarl.tools.tool import bounded, schema_of


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("0.1 + 0.2", "0.3"), ("1 / 8", "0.125"), ("-1 / 8", "-0.125"),
        ("1 / 3", "0.333333333333 (= 1/3)"), ("2 ** 100", str(2**100)), ("2^10", "1024"), ("7 // 2", "3"),
        ("-7 % 3", "2"), ("2 ** -2", "0.25"), ("2 ** 0.5", "1.41421356237"), ("sqrt(16)", "4"), ("sqrt(1/4)", "0.5"),
        ("sqrt(2)", "1.41421356237"), ("factorial(5)", "120"), ("gcd(12, 18)", "6"), ("max(1, 2.5)", "2.5"),
        ("round(2.567, 2)", "2.57"), ("abs(-3)", "3"), ("floor(2.7) + ceil(2.1)", "5"), ("3 × 4 ÷ 2 − 1", "5"),
        ("12*12=", "144"), (" 1\n+ 2 ", "3"), ("1e3", "1000"), ("cos(0)", "1"), ("(-1) ** 1000001", "-1"),
        ("1.5", "1.5"), ("0.005", "0.005"), ("100 / 0.5", "200"), ("0 ** 5", "0"),
    ],
)  # fmt: skip
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9 ** 9 ** 9", "too large"), ("2 ** 1000000", "too large"), ("factorial(10**6)", "factorial"),
        ("10.0 ** 10000", "too large"), ("1e999", "too large"), ("exp(10**6)", "too large"),
        ("*".join(["9" * 200] * 4) + "**99", "too large"), ("1 / 0", "zero"), ("5 % 0", "zero"),
        ("(" * 60 + "1" + ")" * 60 + "+" + "-" * 60 + "1", "nested"), ("(" * 400 + "1" + ")" * 400, "expression"),
        ("1 +", "not an arithmetic"), ("", "1 to"), ("1" * 2000, "1 to"), ("sqrt(-1)", "negative"),
        ("(-8) ** 0.5", "negative"), ("__import__('os')", "cannot compute"), ("(1).__class__", "cannot compute"),
        ("x + 1", "cannot compute x"), ("'a' * 10**9", "cannot compute"), ("[1] * 10**9", "cannot compute"),
        ("True + 1", "cannot compute"), ("1 if 1 else 2", "cannot compute"), ("1 << 10**9", "operators"),
        ("round(1, 10**9)", "places"), ("max()", "cannot be computed"), ("log(0)", "cannot be computed"),
        ("lambda: 1", "cannot compute"), ("0 ** -1", "zero"), ("[" + "-" * 900 + "1]", "nested so deeply"),
        ("x" + ".a" * 400, "nested so deeply"),
         ("sin(10**400)", "too large"),
    ],
)  # fmt: skip
def test_what_is_not_computed(expression: str, message: str) -> None:
    with pytest.raises(CalculationError, match=message):
        calculate(expression)


async def test_the_tool() -> None:
    tool = Calculator()
    answer = await tool.call({"expression": "6 * 7"}, timeout_s=60.0)
    assert (answer.text, answer.error) == ("42", False)
    for wrong in ({}, {"expression": 5}, {"expression": "1", "more": 1}, {"expression": "1/0"}):
        answer = await tool.call(wrong, timeout_s=60.0)
        assert answer.error and answer.text.startswith("error: ")
    await tool.close()
    assert schema_of(tool)["function"]["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize("length", [0, 99, 100, 101, 150, 10_000])
def test_long_answers_are_cut_in_the_middle(length: int) -> None:
    text = "".join(chr(97 + place % 26) for place in range(length))
    cut = bounded(text, 100)
    assert len(cut) <= 100
    assert (cut == text) == (length <= 100)
    if length > 100:
        assert cut.startswith(text[:10]) and cut.endswith(text[-10:]) and "left out" in cut


def test_a_bound_without_room_for_the_note_is_refused() -> None:
    with pytest.raises(ValueError, match="too short"):
        bounded("x" * 100, 20)
