r"""Finds answers that are too large to evaluate. Pure.

sympy computes 9^{9^{9^9}} or (10^8)! exactly, for hours and with all memory, and compares the elements of two sets pair
by pair. So the text of an answer, with powers and factorials of literal numbers written out, must stay short. The time
limit of a sample bounds what this does not find, such as an integral.
"""

import math
import re
from itertools import accumulate

MAX_CHARACTERS = 6000
MAX_DIGITS = 39_000  # sympy computes with them in milliseconds
MAX_EXPONENT = 10**6  # of any base
MAX_ELEMENTS = 200  # of all sets, tuples and lists
MAX_DEPTH = 12  # each further bracket doubles math-verify's time

_NO_MEANING = re.compile(r"\\(?:left|right|[,!;: ])(?![a-zA-Z])|[&~$]|(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))")
_NUMBER = r"(?:\d++(?:\.\d++)?|\.\d++)"
_BRACKETED = rf"[(\[{{]\s*[+-]?\s*{_NUMBER}\s*[)\]}}]"
_LITERAL = rf"(?:{_BRACKETED}|(?<![\d.]){_NUMBER})"
_POWER = r"(?:\^|\*\*)\s*"
_GROWING = re.compile(
    rf"(?P<base>{_LITERAL})?\s?{_POWER}(?P<exponent>{_BRACKETED}|[+-]?{_NUMBER})(?!\s*{_POWER})"
    rf"|(?P<factor>{_LITERAL})\s?!(?!=)|[(\[{{]\s*(?P<inner>{_BRACKETED})\s*[)\]}}]"
)


def is_too_large(text: str) -> bool:
    """Return whether an answer in LaTeX or plain text is too large to evaluate."""
    levels = ((letter in "([{") - (letter in ")]}") for letter in text)
    if len(text) > MAX_CHARACTERS or text.count(",") >= MAX_ELEMENTS:
        return True
    if max(accumulate(levels, lambda depth, step: max(0, depth + step)), default=0) > MAX_DEPTH:
        return True
    text = " ".join(_NO_MEANING.sub("", text).split())
    for _ in range(3 * MAX_DEPTH):  # each round writes out the tops of all towers
        text, found = _GROWING.subn(_written_out, text)
        if not found or len(text) > MAX_DIGITS:
            return bool(found)
    return True


def _written_out(match: re.Match[str]) -> str:
    """Return a power or factorial as digits: as nines if there are many, and as too many if it is too large."""
    if match["inner"]:
        return match["inner"]
    literal = min(1e9, float(re.sub(r"[^\d.]", "", match["factor"] or match["exponent"])))
    if match["factor"]:
        digits = math.lgamma(literal + 1) / math.log(10)
    elif literal > MAX_EXPONENT:
        digits = math.inf
    else:
        base = re.sub(r"\D", "", match["base"] or "").lstrip("0")  # 1.5 counts as 15
        digits = literal * (math.log10(float(f"0.{base}")) + len(base)) if base else 0.0
    return f" {10**digits:.0f} " if digits < 15 else "9" * (1 + int(min(digits, MAX_DIGITS)))
