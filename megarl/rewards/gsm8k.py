"""GSM8K: the number after `####`, else the last number of the response, compared exactly.

The same number: 1,234, 1 234, 1'234, 1_234 and 1234, $5 and 5, 5.0 and 5, 40% and 40, "72." and 72, "18 eggs" and 18,
1/2, \\frac{1}{2} and .5, 3 1/2 and 3.5.
"""

from __future__ import annotations

import re
from fractions import Fraction

from megarl.rewards.types import RewardInput, RewardResult

# Thousands separators only where three digits follow each, one kind in a number; a space none before a unit (2 100-gram
# bags, 2 100ml). A denominator only if the whole is one fraction, a whole part only before a proper one
# of at most two digits above (650 000/2 is none).
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
# A minus that touches its number (or its currency sign) and follows nothing it could subtract from.
_MINUS_BEFORE = re.compile(r"(?<![\w.)\]])(?:-\s?[$€£¥]\s?|[$€£¥]\s?-|-)$")
_TYPOGRAPHY = (
    (re.compile("[\u2212\ufe63\uff0d]"), "-"),
    # Thin or fixed spaces and LaTeX's {,} \, \! between groups of three digits.
    (re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f]|\\[,!;:]|\{,\}|\{\\,\}|,\\!)(?=\d{3}(?!\d))"), ","),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)\s*(?=\\[dt]?frac\s*\{)"), " "),
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?\d[\d.,]*)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
)
# An answer of its own has nothing to subtract from.
_SPACED_MINUS = re.compile(r"^([\s*]*-)\s+(?=[$€£¥.\d])")
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
    tail = _SPACED_MINUS.sub(r"\1", tail)
    match = _NUMBER.search(tail) if marker else None
    if match:
        return _value(tail, match)
    matches = list(_NUMBER.finditer(text))
    return _value(text, matches[-1]) if matches else None


def _value(text: str, match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > _MAX_DIGITS:
        return None
    if match["whole"]:
        whole, part, parts = int(match["whole"]), int(match["part"]), int(match["parts"])
        if not part < parts:
            return Fraction(part, parts or 1)  # two numbers: the second is the answer
        value = whole + Fraction(part, parts)
    else:
        value = Fraction(match["a"].translate(_SEPARATORS))
        if match["b"] and int(match["b"]):
            value /= int(match["b"])
    before = text[max(0, match.start() - 8) : match.start()]
    return -value if _MINUS_BEFORE.search(before) else value
