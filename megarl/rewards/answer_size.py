r"""Estimates how large an answer becomes when it is evaluated, before anything evaluates it. Pure.

sympy computes 9^{9^{9^9}} or (10^8)! exactly, for hours and with all memory, and compares the elements of two sets pair
by pair. The estimate reads LaTeX and plain text in linear time. It is an upper bound of the *height* of the numbers
that appear: the bits of the larger one of numerator and denominator. Letters and functions count as nothing, because
sympy keeps them as symbols. What it does not see (say, an integral) is bounded by the time that a sample has.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

MAX_BITS = 1 << 17  # 39,000 digits, with which sympy computes in milliseconds
MAX_TOKENS = 2000
MAX_ELEMENTS = 200  # of sets, tuples and lists, together
MAX_DEPTH = 13  # math-verify takes twice as long for each further bracket

_TOKEN = re.compile(
    r"""\s+|\\(?:left|right|big|Big|bigg|Bigg|displaystyle|,|!|;|:|\ )(?![a-zA-Z])|[&~$]  # without a meaning
      | (?P<number>\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)
      | (?P<power>\^|\*\*)
      | (?P<factorial>!(?!=))
      | (?P<fraction>\\[dtc]?frac(?![a-zA-Z]))
      | (?P<binomial>\\[dt]?binom(?![a-zA-Z]))
      | (?P<times>\\cdot(?![a-zA-Z])|\\times(?![a-zA-Z])|[*×·])
      | (?P<divide>\\div(?![a-zA-Z])|/|÷)
      | (?P<sign>[+-]|\\pm(?![a-zA-Z])|\\mp(?![a-zA-Z])|−)
      | (?P<open>\\\{|[({\[])
      | (?P<close>\\\}|[)}\]])
      | (?P<subscript>_)
      | (?P<between>[,;:=<>|]|\\\\|\\(?:leq?|geq?|neq?|in|cup|cap|to|quad)(?![a-zA-Z]))
      | (?P<constant>\\(?:exp|pi)(?![a-zA-Z])|e(?![a-zA-Z])|π)
      | (?P<symbol>\\[a-zA-Z]+|\\.|.)""",
    re.VERBOSE | re.DOTALL,
)


_Token = tuple[str, str]  # kind and text


class _TooLarge(Exception):  # noqa: N818  # it ends the reading, and is no error
    """A part of the answer is larger than the limit."""


@dataclass(frozen=True)
class _Height:
    """An upper bound of the bits of a number, and whether it is known to be whole (or a symbol)."""

    bits: float = 0.0
    whole: bool = True

    @property
    def most(self) -> float:
        """The largest absolute value that the number may have."""
        return 2.0**self.bits if self.bits < 1000 else math.inf

    def times(self, other: _Height, *, whole: bool = True) -> _Height:
        return _bounded(self.bits + other.bits, whole and self.whole and other.whole)

    def plus(self, other: _Height) -> _Height:
        if self.whole and other.whole:
            return _bounded(max(self.bits, other.bits) + 1)
        return _bounded(self.bits + other.bits + 1, whole=False)

    def power(self, exponent: _Height) -> _Height:
        return _bounded(self.bits * exponent.most if self.bits else 0.0, self.whole and exponent.whole)

    def factorial(self) -> _Height:
        return _bounded(self.most * self.bits)

    def choose(self, part: _Height) -> _Height:
        return _bounded(min(self.most, part.most * self.bits) if self.bits else 0.0)


def _bounded(bits: float, whole: bool = True) -> _Height:
    if bits > MAX_BITS:
        raise _TooLarge
    return _Height(bits, whole)


def is_too_large(text: str) -> bool:
    """Tell whether an answer in LaTeX or plain text is too large to be evaluated."""
    tokens: list[_Token] = [(match.lastgroup, match[0]) for match in _TOKEN.finditer(text) if match.lastgroup]
    if len(tokens) > MAX_TOKENS or text.count(",") >= MAX_ELEMENTS:
        return True
    try:
        _Reader(tokens).all()
    except _TooLarge:
        return True
    return False


class _Reader:
    """Reads tokens by recursive descent; what is no sound formula is read as far as possible."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0

    def all(self) -> None:
        """Read everything; brackets that close nothing are passed over."""
        while self._place < len(self._tokens):
            self._list()
            self._place += 1

    @property
    def _kind(self) -> str | None:
        return self._tokens[self._place][0] if self._place < len(self._tokens) else None

    def _accept(self, kind: str) -> bool:
        found = self._kind == kind
        self._place += found
        return found

    def _list(self) -> _Height:
        """Read sums with separators between them, up to a closing bracket; the largest one counts."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooLarge
        found = self._sum()
        while self._accept("between"):
            other = self._sum()
            found = _Height(max(found.bits, other.bits), found.whole and other.whole)
        self._depth -= 1
        return found

    def _sum(self) -> _Height:
        self._signs()
        found = self._product()
        while self._signs():
            found = found.plus(self._product())
        return found

    def _signs(self) -> bool:
        found = False
        while self._accept("sign"):
            found = True
        return found

    def _product(self) -> _Height:
        found = _Height()
        while (kind := self._kind) not in (None, "close", "between", "sign"):
            if kind in ("times", "divide"):
                self._place += 1
                self._signs()
                continue
            divided = self._place > 0 and self._tokens[self._place - 1][0] == "divide"
            found = found.times(self._factor(), whole=not divided)
        return found

    def _factor(self) -> _Height:
        """Read an atom with its powers, factorials and subscripts."""
        found = self._atom()
        while True:
            if self._accept("factorial"):
                found = found.factorial()
            elif self._accept("subscript"):
                self._argument()
            elif self._accept("power"):
                self._signs()
                exponent = self._argument(plain=True)
                found = found.power(exponent)
            else:
                return found

    def _argument(self, *, plain: bool = False) -> _Height:
        """Read what belongs to a command or a power: a bracket, a digit (a number if `plain`), or another atom.

        A power of the argument belongs to it: towers are read from the top.
        """
        self._deeper()
        if self._kind == "number" and not plain:
            kind, text = self._tokens[self._place]
            self._tokens[self._place : self._place + 1] = [(kind, digit) for digit in text if digit.isdigit()]
        found = self._atom()
        if plain and self._accept("power"):
            self._signs()
            found = found.power(self._argument(plain=True))
        self._depth -= 1
        return found

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _TooLarge

    def _atom(self) -> _Height:
        kind = self._kind
        if kind in (None, "close"):
            return _Height()
        text = self._tokens[self._place][1]
        self._place += 1
        if kind == "number":
            return _number(text)
        if kind == "open":
            found = self._list()
            self._accept("close")
            return found
        if kind == "fraction":
            return self._argument().times(self._argument(), whole=False)
        if kind == "binomial":
            return self._argument().choose(self._argument())
        return _Height(2.0, whole=False) if kind == "constant" else _Height()


def _number(text: str) -> _Height:
    """Return the height of a number as it is written."""
    digits = re.sub(r"\D", "", text).lstrip("0")
    decimals = len(text.rpartition(".")[2]) if "." in text else 0
    value = float(digits[:15] or 0)  # the first digits are enough
    bits = math.log2(value) + max(0, len(digits) - 15) * math.log2(10) if value >= 1 else 0.0
    return _bounded(max(bits, decimals * math.log2(10)), whole=not decimals)
