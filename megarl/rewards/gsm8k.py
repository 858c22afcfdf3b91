"""GSM8K: the number after `####`, else the last number of the response, compared exactly.

The same number: 1,234 and 1234, $5 and 5, 5.0 and 5, 40% and 40, "72." and 72, "18 eggs" and 18, 1/2 and .5.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megarl.rewards.types import RewardInput, RewardResult

# Thousands separators only where three digits follow each; a denominator only if the whole is one fraction.
_NUMBER = re.compile(
    r"(?P<a>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:/(?P<b>\d+)(?![\d/]))?", re.ASCII
)
# A minus that touches its number (or its currency sign) and follows nothing it could subtract from.
_MINUS_BEFORE = re.compile(r"(?<![\w.)\]])(?:-\s?[$€£¥]\s?|[$€£¥]\s?-|-)$")
_TYPOGRAPHY = (
    (re.compile("[\u2212\ufe63\uff0d]"), "-"),
    # Thin or fixed spaces and LaTeX's {,} \, \! between groups of three digits.
    (re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f]|\\[,!;:]|\{,\}|\{\\,\}|,\\!)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
)
_MAX_DIGITS = 300


def gsm8k(sample: RewardInput) -> RewardResult:
    """1 if the response's final number equals the reference's, else 0; components `correct` and `parsed`.

    The reference may be a bare number or GSM8K's own worked answer. Raises ValueError if it holds no number.
    """
    reference = final_number(sample.answer)
    if reference is None:
        raise ValueError(f"the reference answer {sample.answer[-60:]!r} holds no number")
    found = final_number(sample.response)
    score = float(found == reference)
    answer = None if found is None else str(found)
    return RewardResult(score, {"correct": score, "parsed": float(found is not None)}, answer)


def final_number(text: str) -> Fraction | None:
    """The first number after the last `####`; without one there, the last of the text; None if none."""
    for pattern, replacement in _TYPOGRAPHY:
        text = pattern.sub(replacement, text)
    _, marker, tail = text.rpartition("####")
    match = _NUMBER.search(tail) if marker else None
    if match:
        return _value(tail, match)
    matches = list(_NUMBER.finditer(text))
    return _value(text, matches[-1]) if matches else None


def _value(text: str, match: re.Match[str]) -> Fraction | None:
    digits, denominator = match["a"].replace(",", ""), match["b"] or ""
    if len(digits) > _MAX_DIGITS or len(denominator) > _MAX_DIGITS:
        return None
    value = Fraction(digits)
    if denominator and int(denominator):
        value /= int(denominator)
    before = text[max(0, match.start() - 8) : match.start()]
    return -value if _MINUS_BEFORE.search(before) else value
