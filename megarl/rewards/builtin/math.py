r"""The `math` reward: compares the last \boxed{} of the response, else its final answer, with math-verify.

Both texts are cleaned first (`math_text.py`). Plain numbers, and answers that algebra would misread, are compared here
(`math_forms.py`); math-verify parses and compares the rest. Its timeouts are off: they use SIGALRM, which fails outside
the main thread, and the pool kills a process whose sample takes too long. Answers too large to evaluate
(`sympy_guard.py`) are not passed to it: they are right only if they equal the reference letter for letter.
"""

import logging
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from megarl.rewards.builtin.math_forms import Answer, chosen, listed, sides, with_variable
from megarl.rewards.builtin.math_text import stated_answer, states_answer
from megarl.rewards.builtin.sympy_guard import is_too_large
from megarl.rewards.types import RewardInput, RewardResult, judged_part

_BRACES = re.compile(r"\\?(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAIL_CHARACTERS = 3000  # a final answer without a box is at the end
# A side of an equation without variables.
_ARITHMETIC = re.compile(r"(?=.*\d)(?:[\d\s.+\-*/^(){}]|\\(?:frac|cdot|times|sqrt)(?![a-zA-Z]))+")
_WHOLE = re.compile(r"[-+]?\d[\d,]*")
_NUMBER = r"[-+]?\(?\d[\d,]*(?:\.\d+)?\)?"
_SIGN = r"(?:[-*+/x\u00d7\u00b7\u00f7\u2212]|\\(?:times|cdot|div)(?![a-zA-Z]))"
_OPERATION = re.compile(rf"\W*{_NUMBER}(?:\s*{_SIGN}\s*{_NUMBER})+\W*")
# math-verify compares decimals to six places; here six significant digits must agree as well.
_DECIMALS, _EXACT = 5e-6, 1e-12
_OR = re.compile(r"(?<![a-zA-Z])or(?![a-zA-Z])|\\(?:lor|vee)(?![a-zA-Z])")
_AND = re.compile(r"(?<![a-zA-Z])and(?![a-zA-Z])|\\(?:land|wedge)(?![a-zA-Z])")
_MORE_THAN_A_NUMBER = re.compile(
    r"[<>;]|,(?!\d{3}(?!\d))|\\(?:mid|in|notin|le|ge|leq|geq|leqslant|geqslant|lt|gt)(?![a-zA-Z])"
)
Parsed = tuple[Any, ...]  # math-verify's untyped result: sympy expressions, then their text


def math(sample: RewardInput, require_box: bool = False, answer_after: str | None = "auto") -> RewardResult:
    r"""Return 1 if the final answer of the response mathematically equals the reference, else 0.

    Components: `correct`, `parsed` (an answer was found), `boxed` (it is in a \boxed{}). With `require_box` a response
    without a box has no answer. Only the text after the model's reasoning is judged (`judged_part`). Raises ValueError
    if the reference cannot be parsed.
    """
    response = judged_part(sample, answer_after)
    content = last_boxed(response)
    boxed = content is not None
    if content is None and not require_box and not _BOX.search(response):  # a truncated box is not an answer
        start = max(0, min(len(response) - _TAIL_CHARACTERS, response.lower().rfind("answer") % (len(response) + 1)))
        content = stated_answer(response[start : start + _TAIL_CHARACTERS])
        if content and _WHOLE.fullmatch(sample.answer.strip()) and _OPERATION.fullmatch(content):
            content = None  # an uncomputed operation, perhaps the problem's
    found, correct = compare(sample.answer, content or "")
    components = {"correct": float(correct), "parsed": float(found is not None), "boxed": float(boxed)}
    return RewardResult(float(correct), components, found)


def check_row(answer: str, row: Mapping[str, Any]) -> None:
    """Raise ValueError for a reference answer that is empty or the text of a missing number (nan)."""
    if _reference_text(answer).strip().lower() in ("", "nan"):
        raise ValueError(f"the reference answer {answer[-60:]!r} is missing; correct the data file")


@lru_cache(maxsize=4096)
def compare(reference: str, answer: str) -> tuple[str | None, bool]:
    """Return (canonical `answer`, or None if it cannot be parsed; whether it equals `reference`).

    Cached, because the samples of a group mostly give the same few answers, and math-verify takes milliseconds for
    each. Raises ValueError if the reference cannot be parsed.
    """
    expected_text = _reference_text(reference)
    expected, found = Answer.read(expected_text), Answer.read(chosen(answer, expected_text))
    units = [each.unit for each in (expected, found)]
    if expected.percent != found.percent:
        units = [each.unit or ("%" if each.percent else None) for each in (expected, found)]
    other_unit = all(units) and units[0] != units[1]
    if other_unit or (found.decided and expected.decided):
        return found.name, not other_unit and found.says(expected)
    if is_too_large(expected.text) or is_too_large(found.text):
        same = "".join(answer.split())
        return (same, True) if same == "".join(expected_text.split()) else (None, False)
    if (equal := _elementwise(expected.text, found.text)) is not None:
        return found.name or "".join(found.text.split()), equal
    gold = _parse(with_variable(expected.text, found.text))
    if not gold and expected.verbatim is None:
        raise ValueError(
            f"the reference answer {reference[-60:]!r} cannot be read by math-verify; correct the data file"
        )
    spelled, words = found.spells(expected), found.verbatim is not None
    parsed = () if words else _parse(with_variable(found.text, expected.text))
    if not (spelled or words or parsed) or (not spelled and _contradicts_itself(found.text)):
        return None, False
    name = found.name or (canonical(parsed) if parsed else "".join(found.text.split()))
    if spelled or words or expected.verbatim is not None:
        return name, spelled
    return name, _equal(expected, gold, found, parsed)


def _elementwise(expected: str, found: str) -> bool | None:
    """Compare two lists, tuples or sets element by element, each as an answer; None where algebra decides."""
    kinds = [listed(each) for each in (expected, found)]
    if kinds[0] is None or kinds[1] is None:
        return None
    (bracket, wanted), (other, given) = kinds[0], kinds[1]
    if {bracket, other} == {"(", r"\{"} or (bracket == other == "" and len(wanted) != len(given)):
        return False
    if bracket != other or len(wanted) != len(given):
        return None
    if bracket in ("(", "["):
        return all(compare(*pair)[1] for pair in zip(wanted, given, strict=True))
    for each in wanted:
        match = next((place for place, one in enumerate(given) if compare(each, one)[1]), None)
        if match is None:
            return False
        del given[match]
    return True


def _equal(expected: Answer, gold: Parsed, found: Answer, parsed: Parsed) -> bool:
    r"""Compare parsed answers. 35\% equals 0.35 and, if the other side has no percent sign, 35."""
    if _same(gold, parsed):
        return True
    if expected.percent == found.percent:
        return False
    if expected.percent:
        return _same(_parse(rf"\frac{{{expected.text}}}{{100}}"), parsed)
    return _same(gold, _parse(rf"\frac{{{found.text}}}{{100}}"))


def _same(gold: Parsed, parsed: Parsed) -> bool:
    from math_verify import verify

    # Inequalities and intervals may equal each other: restating a problem that asks for an interval gains nothing.
    equal = verify(list(gold), list(parsed), timeout_seconds=None, allow_set_relation_comp=True)
    return (bool(equal) and not _apart(gold[0], parsed[0])) or _same_curve(gold[0], parsed[0])


def _same_curve(a: Any, b: Any) -> bool:  # noqa: ANN401 (sympy has no types)
    """Return whether two polynomial equations in several variables are multiples of each other."""
    from sympy import Eq, cancel

    if not all(isinstance(side, Eq) and len(side.free_symbols) > 1 for side in (a, b)):
        return False
    difference = [side.lhs - side.rhs for side in (a, b)]
    if not all(side.is_polynomial() for side in difference):
        return False
    ratio = cancel(difference[0] / difference[1])
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def _apart(a: Any, b: Any) -> bool:  # noqa: ANN401 (sympy has no types)
    """Return whether values that math-verify takes as equal differ by more than a small part of their size.

    Its tolerance is absolute, so all small numbers are equal to it.
    """
    from sympy import Basic, Eq, FiniteSet, Float, Rational, Tuple

    a, b = (side.rhs if isinstance(side, Eq) else side for side in (a, b))
    if isinstance(a, FiniteSet | Tuple) and isinstance(b, FiniteSet | Tuple) and len(a.args) == len(b.args):
        return any(all(_apart(one, other) for other in b.args) for one in a.args)
    if not all(isinstance(side, Basic) and getattr(side, "is_number", False) for side in (a, b)):
        return False
    a, b = a.doit(), b.doit()
    if a == b:
        return False
    if not (a.is_finite and b.is_finite):  # 1/0, or an infinity
        return True
    if isinstance(a, Rational) and isinstance(b, Rational):
        return True
    difference, size = abs((a - b).evalf(30)), max(abs(a.evalf(30)), abs(b.evalf(30)))
    return bool(difference > (_DECIMALS if a.has(Float) or b.has(Float) else _EXACT) * size)


def _contradicts_itself(text: str) -> bool:
    """Return whether two sides without variables differ, as in the chain 11 = 12."""
    parts = [side for side in sides(text) if _ARITHMETIC.fullmatch(side)]
    values = [found[0] for side in parts if (found := _parse(side)) and getattr(found[0], "is_finite", False)]
    rounded = any("." in side for side in parts)
    return any(
        bool(abs((value - values[-1]).evalf(30)) > (0.01 if rounded else _EXACT) * abs(values[-1].evalf()))
        for value in values
    )


def canonical(found: Parsed) -> str:
    r"""Return the same string for equal numbers: 0.50, \frac12 and 1/2 become `1/2`, and x = 3 becomes `3`.

    Unlike `verify`, it does not decide equivalence: 2(x + 1) and 2x + 2 remain two answers.
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
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    for answer in ("7", r"\frac{1}{2}", "1.5"):
        math(RewardInput(prompt="", response=rf"The answer is \boxed{{{answer}}}.", answer=answer))
    math(RewardInput(prompt="", response="The answer is 8.", answer="7"))


math.warm_up = _warm_up  # type: ignore[attr-defined]


def _reference_text(answer: str) -> str:
    """Return the part of a reference answer to compare."""
    content = last_boxed(answer)
    if content is None and "####" not in answer and len(answer.split()) > 4 and states_answer(answer):
        content = stated_answer(answer)
    return answer.rpartition("####")[2].strip().strip("$") if content is None else content


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed \boxed{...} or \fbox{...}, or None. The inner of nested boxes counts."""
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


@cache
def _configurations() -> tuple[Any, ...]:
    """Return how math-verify reads a box. `math_text.py` cuts units before: math-verify would also cut the t of 3t."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    rules = NormalizationConfig(basic_latex=True, malformed_operators=True, nits=True, boxed="all")
    return LatexExtractionConfig(normalization_config=rules), ExprExtractionConfig()


@lru_cache(maxsize=4096)
def _parse(content: str) -> Parsed:
    """Parse the content of a box; empty if it is."""
    from math_verify import parse

    found = parse(rf"\boxed{{{content}}}", _configurations(), parsing_timeout=None) if content else ()
    if found and getattr(found[0], "is_number", False) and _MORE_THAN_A_NUMBER.search(content):
        return ("".join(content.split()),)  # it read only a number of the text
    if found and (_OR.search(content) or _AND.search(content)):
        return (_united(found[0], bool(_OR.search(content))), *found[1:])
    return (_with_one_i(found[0]), *found[1:]) if found else ()


def _with_one_i(value: Any) -> Any:  # noqa: ANN401 (sympy has no types)
    """Return a number in i with the imaginary unit; otherwise make all variables real, the same in all answers.

    math-verify makes variables real where it sees no complex number, and sees one in 3 + 4 i, but not in 3+4i.
    """
    from sympy import Equality, Expr, I, Symbol

    side = value.rhs if isinstance(value, Equality) and value.lhs.is_Symbol else value
    names = getattr(side, "free_symbols", ())
    if isinstance(side, Expr) and {str(name) for name in names} == {"i"}:
        return side.xreplace({name: I for name in names})
    complex_ones = [name for name in getattr(value, "free_symbols", ()) if not name.is_real]
    return value.xreplace({name: Symbol(name.name, real=True) for name in complex_ones}) if complex_ones else value


def _united(value: Any, either: bool) -> Any:  # noqa: ANN401 (sympy has no types)
    """Return the set of inequalities joined by `or` (`either`) or `and`, which math-verify reads as separate ones."""
    from sympy import And, FiniteSet, Intersection, Union
    from sympy.core.relational import Equality, Relational

    if not isinstance(value, FiniteSet) or not all(isinstance(each, Relational | And) for each in value.args):
        return value
    if len(value.free_symbols) != 1 or value.has(Equality):
        return value
    return (Union if either else Intersection)(*(each.as_set() for each in value.args))
