r"""The `math` reward: compares the last \boxed{} of the response, else its final answer, by math-verify.

math-verify's own timeouts are off, because they use SIGALRM, which raises outside the main thread, and because the pool
kills a process whose sample takes too long. math-verify is not given an answer that would be too large to evaluate
(`is_too_large`): it is right only if it is the reference, letter for letter.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from itertools import accumulate
from math import inf, lgamma, log, log10
from typing import Any

from megarl.rewards.types import RewardInput, RewardResult

_BRACES = re.compile(r"\\?(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_TAIL_CHARACTERS = 3000  # a final answer without a box is at the end, and math-verify is slow on long text
# What math-verify evaluates in text without a box: formulas, and expressions of digits and operators.
_FORMULA = re.compile(r"\$\$?[^$]+\$\$?|\\\[.*?\\\]|\\\(.*?\\\)|[\d(][\d\s.+\-*×/^()÷]*\^[\d\s.+\-*×/^()÷]*", re.DOTALL)
# One way to write each of them, so two that differ are different numbers. Longer ones are left to math-verify.
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
_LEFT_OUT_TEXT = "too large"
_LEFT_OUT = rf"$\text{{{_LEFT_OUT_TEXT}}}$"
Parsed = list[Any]  # math-verify's result, untyped: sympy expressions, then the text that they were read from


def math(sample: RewardInput, require_box: bool = False) -> RewardResult:
    r"""Return 1 if the final answer of the response is mathematically equal to the reference, else 0.

    Components: `correct`, `parsed` (an answer was found), `boxed` (it is in a \boxed{}). With `require_box` a response
    without a box has no answer. Raises ValueError if the reference cannot be parsed.
    """
    content = last_boxed(sample.response)
    found, correct = compare(sample.answer, _answer(sample.response, content, require_box))
    components = {
        "correct": float(correct),
        "parsed": float(found is not None),
        "boxed": float(content is not None),
    }
    return RewardResult(float(correct), components, found)


def _answer(response: str, content: str | None, require_box: bool) -> str:
    """Return the text in which the final answer is looked for; `content`: that of the last box."""
    if content is not None:
        return rf"\boxed{{{content}}}"
    return "" if require_box else response[-_TAIL_CHARACTERS:]


@lru_cache(maxsize=4096)
def compare(reference: str, answer: str) -> tuple[str | None, bool]:
    """Return (`answer` in canonical form, or None if it cannot be parsed; whether it equals `reference`).

    Results are cached, because the samples of a group mostly give the same few answers and math-verify takes
    milliseconds for each. Raises ValueError if the reference cannot be parsed.
    """
    content, expected_text = last_boxed(answer), _reference_text(reference)
    if content is not None and _INTEGER.fullmatch(content) and _INTEGER.fullmatch(expected_text):
        return content, content == expected_text
    if content is not None and (is_too_large(content) or is_too_large(expected_text)):
        same = "".join(content.split()) == "".join(expected_text.split())
        return ("".join(content.split()), True) if same else (None, False)
    if is_too_large(expected_text):
        return None, False
    if content is None:
        answer = _FORMULA.sub(lambda match: _LEFT_OUT if is_too_large(match[0]) else match[0], answer)
    expected = parse_reference(reference)
    if not expected:
        raise ValueError(
            f"the reference answer {reference[-60:]!r} cannot be read by math-verify; correct the data file"
        )
    from math_verify import verify

    found = _parse(answer) if answer else []
    if not found or found[-1] == _LEFT_OUT_TEXT:
        return None, False
    return canonical(found), bool(verify(list(expected), found, timeout_seconds=None))


def canonical(found: Parsed) -> str:
    r"""Return the same string for equal numbers: 0.50, \frac12 and 1/2 become `1/2`, and x = 3 becomes `3`.

    It does not decide equivalence as `verify` does, which compares pairs: 2(x + 1) and 2x + 2 remain two answers.
    """
    from sympy import Equality, Float, Rational

    value, text = found[0], "".join(str(found[-1]).split())
    if isinstance(value, str):
        return text
    if isinstance(value, Equality) and value.lhs.is_Symbol:
        value = value.rhs
    try:
        return str(Rational(str(value)) if isinstance(value, Float) else value)
    except (TypeError, ValueError):  # an infinity, or more digits than Python converts to text
        return text


def _warm_up() -> None:
    """Import math-verify and build its grammars, which takes seconds once per process."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its timeouts are off
    for answer in ("7", r"\frac{1}{2}", "1.5"):
        math(RewardInput(prompt="", response=rf"The answer is \boxed{{{answer}}}.", answer=answer))
    math(RewardInput(prompt="", response="The answer is 8.", answer="7"))


math.warm_up = _warm_up  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def parse_reference(answer: str) -> tuple[Any, ...]:
    r"""Parse a reference answer: its last \boxed{}, else the text after `####`, else all of it. Empty if that fails."""
    content = _reference_text(answer)
    return tuple(_parse(rf"\boxed{{{content}}}")) if content else ()


def _reference_text(answer: str) -> str:
    """Return the part of a reference answer that is compared."""
    content = last_boxed(answer)
    return answer.rpartition("####")[2].strip().strip("$") if content is None else content


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} whose braces are closed; None if there is none.

    Of nested boxes the inner one counts, because it begins later.
    """
    open_braces: list[tuple[bool, int]] = []
    found: tuple[int, int] | None = None
    for token in _BRACES.finditer(text):
        if token["open"] or token["box"]:
            open_braces.append((bool(token["box"]), token.end()))
        elif token["close"] and open_braces:
            is_box, start = open_braces.pop()
            if is_box and (found is None or start > found[0]):
                found = (start, token.start())
    return text[found[0] : found[1]].strip() if found else None


def _parse(text: str) -> Parsed:
    from math_verify import parse

    found: Parsed = parse(text, parsing_timeout=None)
    return found


# Answers that are too large to be evaluated, found before anything evaluates them.
#
# sympy computes 9^{9^{9^9}} or (10^8)! exactly, for hours and with all memory, and compares the elements of two sets
# pair by pair. The text of an answer, with the digits of its powers and factorials of literal numbers written out, has
# to stay short. What this does not find (say, an integral) is bounded by the time that a sample has.

MAX_CHARACTERS = 6000
MAX_DIGITS = 39_000  # with which sympy computes in milliseconds
MAX_EXPONENT = 10**6  # of any base
MAX_ELEMENTS = 200  # of sets, tuples and lists, together
MAX_DEPTH = 12  # math-verify takes twice as long for each further bracket

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
    """Tell whether an answer in LaTeX or plain text is too large to be evaluated."""
    levels = ((letter in "([{") - (letter in ")]}") for letter in text)
    if len(text) > MAX_CHARACTERS or text.count(",") >= MAX_ELEMENTS:
        return True
    if max(accumulate(levels, lambda depth, step: max(0, depth + step)), default=0) > MAX_DEPTH:
        return True
    text = " ".join(_NO_MEANING.sub("", text).split())
    for _ in range(3 * MAX_DEPTH):  # a round writes out the tops of all towers
        text, found = _GROWING.subn(_written_out, text)
        if not found or len(text) > MAX_DIGITS:
            return bool(found)
    return True


def _written_out(match: re.Match[str]) -> str:
    """Return a power or factorial as digits, or as nines if there are many; too many if it is too large."""
    if match["inner"]:
        return match["inner"]
    literal = min(1e9, float(re.sub(r"[^\d.]", "", match["factor"] or match["exponent"])))
    if match["factor"]:
        digits = lgamma(literal + 1) / log(10)
    elif literal > MAX_EXPONENT:
        digits = inf
    else:
        base = re.sub(r"\D", "", match["base"] or "").lstrip("0")  # 1.5 counts as 15
        digits = literal * (log10(float(f"0.{base}")) + len(base)) if base else 0.0
    return f" {10**digits:.0f} " if digits < 15 else "9" * (1 + int(min(digits, MAX_DIGITS)))
