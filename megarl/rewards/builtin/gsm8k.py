r"""The `gsm8k` reward: exactly compares the number after `####`, else in a \boxed{} or <answer>, else the last one.

After the mark, and in a box, the number after the last equals sign counts (10 + 10 = 20), or before it if a calculation
follows (20 = 10 + 10); without an equals sign the first number counts.

Equal numbers are: 1,234, 1 234, 1'234, 1_234 and 1234; $5 and 5; 5.0 and 5; 40% and 40; "72." and 72; "18 eggs" and 18;
1/2, \frac{1}{2} and .5; 3 1/2 and 3.5; 1.5e3, 1.5 \times 10^3 and 1500.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from megarl.rewards.builtin.math import last_boxed
from megarl.rewards.builtin.math_text import E_NOTATION, decimal, tagged_answer, typography
from megarl.rewards.types import RewardInput, RewardResult, judged_part

# Exactly three digits follow each thousands separator, and a number has only one kind of them. A space is not one if a
# unit follows the digits (2 100-gram bags, 2 100ml). A denominator must not be part of a longer chain of slashes. A
# whole part counts only before a proper fraction whose numerator has at most two digits (not in 650 000/2).
_NUMBER = re.compile(
    r"""(?P<whole>(?<![\d.,])\d+)[ ](?P<part>[1-9]\d?)/(?P<parts>\d+)(?![\d/])
      | (?P<a>(?: \d{1,3}(?:,\d{3})+(?!\d)
                | (?<!\d)[1-9]\d{0,2}(?P<separator>['_\u2019])\d{3}(?:(?P=separator)\d{3})*(?!\d)
                | (?<!\d)[1-9]\d{0,2}(?:[ ]\d{3})+(?!\d|-?[a-zA-Z])
                | \d+)(?:\.\d+)?
          | (?<!\d)\.\d+)
        (?:/(?P<b>\d+)(?![\d/]))?""",
    re.ASCII | re.VERBOSE,
)
_SEPARATORS = str.maketrans("", "", ",'_\u2019 ")
# A minus sign directly before its number or currency sign, with no operand of a subtraction before it.
_MINUS_BEFORE = re.compile(r"(?<![\w.)\]])(?:-\s?[$€£¥]\s?|[$€£¥]\s?-|-)$")
_TYPOGRAPHY = (
    # LaTeX's separators between groups of three digits.
    (re.compile(r"(?<=\d)(?:\\[,!;:]|\{,\}|\{\\,\}|,\\!)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dtc]?frac\s*[\d{])"), " "),
    (re.compile(r"\\[dtc]?frac\s*\{\s*(-?\d[\d.,]*)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r"\1/\2"),
)
_POWER = re.compile(r"(?<![\w.,])(\d+(?:\.\d+)?)\s*(?:\\times|\\cdot|[×*])\s*10\s*(?:\^|\*\*)\s*\{?\s*([-+]?\d+)\s*\}?")
# At the start of the text after `####`, a minus sign followed by a space is not a subtraction.
_SPACED_MINUS = re.compile(r"^([\s*]*-)\s+(?=[$€£¥.\d])")
_CALCULATION = re.compile(r"\d\s*(?:[-+*/x]|\\(?:times|cdot|div)(?![a-zA-Z]))\s*\d+\s*\W*$")
_MAX_DIGITS = 300


def gsm8k(sample: RewardInput, answer_after: str | None = "auto") -> RewardResult:
    """Return 1 if the final number of the response equals the reference's, else 0; components `correct`, `parsed`.

    The reference may be a bare number, or a worked answer as in GSM8K's files. Only the text after the model's
    reasoning is judged (`judged_part`). Raises ValueError if the reference has no number.
    """
    reference = check_row(sample.answer, sample.row)
    found = final_number(judged_part(sample, answer_after))
    score = float(found == reference)
    answer = None if found is None else str(found)
    return RewardResult(score, {"correct": score, "parsed": float(found is not None)}, answer)


def check_row(answer: str, row: Mapping[str, Any]) -> Fraction:
    """Return the number of a reference answer. Raises ValueError if it has none."""
    if (reference := final_number(answer)) is None:
        raise ValueError(f"the reference answer {answer[-60:]!r} has no number; correct the data file")
    return reference


def final_number(text: str) -> Fraction | None:
    """Return the number after the last `####`, else in the last box, else the last number, else None."""
    _, marker, tail = text.rpartition("####")
    stated = tail if marker else last_boxed(text) or tagged_answer(text)
    if stated is not None:
        stated = _SPACED_MINUS.sub(r"\1", _typed(stated.strip().partition("\n")[0]))
        _, equals, after = stated.rpartition("=")
        if _CALCULATION.search(after) is not None:
            equals = ""
        match = (_NUMBER.search(after) if equals else None) or _NUMBER.search(stated)
        if match:
            return _value(stated if match.string is stated else after, match)
    text = _typed(text)
    matches = list(_NUMBER.finditer(text))
    return _value(text, matches[-1]) if matches else None


def _typed(text: str) -> str:
    """Return the text with typographic signs and LaTeX's numbers in plain characters."""
    text = _POWER.sub(lambda match: decimal(f"{match[1]}e{match[2]}"), typography(text))
    text = E_NOTATION.sub(lambda match: decimal(match[0]), text)
    for pattern, replacement in _TYPOGRAPHY:
        text = pattern.sub(replacement, text)
    return text


def _value(text: str, match: re.Match[str]) -> Fraction | None:
    """Return the number of a match, with the sign before it; None if it is longer than any real answer."""
    if len(match[0]) > _MAX_DIGITS:
        return None
    if match["whole"]:
        whole, part, parts = int(match["whole"]), int(match["part"]), int(match["parts"])
        if not part < parts:
            return Fraction(part, parts or 1)  # not a mixed number but two numbers; the last one is the answer
        value = whole + Fraction(part, parts)
    else:
        value = Fraction(match["a"].translate(_SEPARATORS))
        if match["b"] and int(match["b"]):
            value /= int(match["b"])
    before = text[max(0, match.start() - 8) : match.start()]
    return -value if _MINUS_BEFORE.search(before) else value
