r"""What kind of answer a text is: a number as it is written, a form that algebra would misread, or an expression. Pure.

math-verify reads ABC as a product, 2:15 as a quotient, 2024-03-05 as a difference, and it drops the base of 1101_2, the
modulus of a congruence and the relation of `\ge 7`. Such answers are compared as what they say.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.builtin.math_text import clean

_MAX_CHARACTERS = 500  # longer answers go to math-verify as they are
_MAX_DIGITS = 300  # more than any real answer has
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)"
_LITERAL = re.compile(
    rf"(?:[a-zA-Z]\s*=\s*)?(?P<sign>[-+]?)\s*(?:\\?[$€£¥]\s*)?"
    rf"(?:\\[dtc]?frac\s*(?:\{{\s*(?P<top>{_NUMBER})\s*\}}\s*\{{\s*(?P<bottom>{_NUMBER})\s*\}}|(?P<t>\d)\s*(?P<b>\d))"
    rf"|(?P<number>{_NUMBER})(?:\s*/\s*(?P<divisor>{_NUMBER})"
    rf"|\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{{\s*(?P<power>[-+]?\d+)\s*\}}|(?P<digit>\d)))?"
    rf"|(?P<start>\d*)\.(?P<fixed>\d*)\\overline\s*\{{\s*(?P<repeated>\d+)\s*\}})\s*(?:\^\\circ)?"
)
_PERCENT = re.compile(
    r"(?:\s|\\[,;: ]|~)*(?:\\?%|(?<![a-zA-Z])percent|\\(?:text|mathrm)\{\s*(?:percent|\\?%)\s*\})\s*$"
)

_TEXT = re.compile(r"\\(?:text|mathrm|textnormal|mbox|operatorname)\s*\{([^{}]*)\}")
_CLOCK = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_DATE = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})|(\d{1,2})[-/.](\d{1,2})[-/.](\d{4}|\d\d)")
_NUMERAL = re.compile(r"\(?([0-9][0-9A-Za-z]*|[0-9A-Fa-f]{2,})\)?\s*_\s*(?:\{\s*(\w+)\s*\}|(\d))")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_MODULUS = re.compile(
    r"[(\[]?\s*(?:\\pmod|\\mod|\\bmod|(?<![a-zA-Z])mod(?:ulo)?)\s*(?:\{\s*([^{}]+?)\s*\}|([^\s{}()]+))\s*[)\]]?\s*$"
)
_CONGRUENT = re.compile(r"\\equiv|≡|=")
_DOTS = re.compile(r"\\(?:[lcdv]?dots[bcimo]?|hdots)(?![a-zA-Z])|\.\.\.")
_RELATION = re.compile(r"\\(?:geqslant|leqslant|geq|leq|ge|le|gt|lt|neq|ne)(?![a-zA-Z])|[<>]=?|!=")
_NOT_EQUAL = re.compile(r"\\neq?(?![a-zA-Z])|!=|\\not\s*=")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_NAMES = re.compile(  # words that are functions and constants
    "pi|theta|alpha|beta|gamma|delta|phi|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|sqrt|inf(?:ty|inity)?|oo|mod|and|or"
)
_SHORT_WORDS = frozenset(("yes", "no", "odd"))  # which no product of variables is
_QUALIFIED = re.compile(
    r"\bor\s+(?:more|less|fewer)\b|\bat\s+(?:least|most)\b|\b(?:remainder|more|less|fewer|over|under)\b"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(?:\\?[$€£¥]\s*)?({_NUMBER})\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})s?(?![a-zA-Z])")
_SHORT_UNITS = "cm|mm|km|dm|kg|mg|ml|mL|ft|in|lb|hrs?|mins?|secs?|deg|sq|mph|kmh|days?|men|eggs?|cups?"
_UNIT = (
    rf"(?:\\(?:text|mathrm|textnormal|mbox)\s*\{{[^{{}}]*\}}|(?:{_SHORT_UNITS})(?![a-zA-Z])"
    r"|(?<=[\s/])[mgshlL](?![a-zA-Z])|(?<=\s)[a-zA-Z]{4,})"
)
# Units that are compared where both answers have one.
_MEASURE = re.compile(
    r"(?:\d|[\s~{}/;,])(km|cm|mm|dm|m|kg|mg|g|ml|ft|in|lb|hr|min|sec|mph|kmh)s?\s*\}?(?:\s*\^\s*(?:\{\d\}|\d))?$",
    re.IGNORECASE,
)
_CHOICE, _CHOSEN = re.compile(r"\(?([A-J])\)?"), re.compile(r"[{\s]*\(([A-J])\)\W*\w")
_UNITS = re.compile(rf"(?:(?:\s|\\[,;: ]|~|/|\\cdot(?![a-zA-Z]))*{_UNIT}(?:\s*\^\s*(?:\{{-?\d\}}|\d))?)+$")


@dataclass(frozen=True)
class Answer:
    r"""An answer as it is compared.

    `text`: clean LaTeX without a percent sign at its end. `literal`: its number, if it is written out. `verbatim`: what
    is compared letter by letter, if algebra would misread it. `unit`: that at its end, if it is known.
    """

    text: str
    percent: bool = False
    literal: Literal | None = None
    verbatim: str | None = None
    unit: str | None = None

    @classmethod
    def read(cls, written: str) -> Answer:
        """Read the content of a box, or a reference answer."""
        if len(written) > _MAX_CHARACTERS:
            return cls(written)
        text = clean(written)
        words = verbatim(text)
        if words is not None:
            return cls(text, verbatim=words)
        unit = _MEASURE.search(text)
        text, percent = without_percent(without_units(text))
        return cls(text, percent, literal(text), unit=unit[1].lower() if unit is not None else None)

    @property
    def decided(self) -> bool:
        """Whether the answer is compared without math-verify, if the other one is too."""
        return self.literal is not None or self.verbatim is not None

    @property
    def name(self) -> str | None:
        """One spelling of a decided answer; None for an expression."""
        if self.literal is None:
            return self.verbatim
        return str(self.literal.value) + ("%" if self.percent else "")

    def says(self, other: Answer) -> bool:
        """Tell whether two decided answers are the same."""
        if self.literal is None or other.literal is None:
            return self.verbatim == other.verbatim
        mine, theirs = self.literal, other.literal
        if mine.equals(theirs):
            return True
        if self.percent == other.percent:
            return False
        return mine.divided(100 if self.percent else 1).equals(theirs.divided(100 if other.percent else 1))


@dataclass(frozen=True)
class Literal:
    """A number that is written out. `exact`: it has no decimal point, so it rounds nothing."""

    value: Fraction
    exact: bool

    def equals(self, other: Literal) -> bool:
        """Tell whether two numbers are the same: decimals if six places and six significant digits agree."""
        one, two = self.value, other.value
        if one == two or (self.exact and other.exact):
            return one == two
        return round(one, 6) == round(two, 6) and abs(one - two) <= 5 * max(abs(one), abs(two)) / 10**6

    def divided(self, by: int) -> Literal:
        """Return the number divided by `by`."""
        return Literal(self.value / by, self.exact)


def chosen(answer: str, reference: str) -> str:
    r"""Return `C` for an answer such as `\textbf{(C) }12` where the reference is a letter alone, else the answer."""
    if _CHOICE.fullmatch(clean(reference)) is None:
        return answer
    letter = _CHOSEN.match(_TEXT.sub(r"\1", clean(answer)))
    return answer if letter is None else letter[1]


def literal(text: str) -> Literal | None:
    r"""Read an integer, a decimal, a fraction of two of them, a \times 10^n, 0.\overline{3}; None if it is none."""
    match = _LITERAL.fullmatch(text)
    if match is None or len(text) > _MAX_DIGITS:
        return None
    if match["repeated"]:
        whole, fixed, repeated = match["start"], match["fixed"], match["repeated"]
        ones, places = int(f"{whole}{fixed}" or "0"), 10 ** len(fixed)
        value, exact = Fraction(ones, places) + Fraction(int(repeated), (10 ** len(repeated) - 1) * places), True
    else:
        bottom = _fraction(match["bottom"] or match["b"] or match["divisor"] or "1")
        power = int(match["power"] or match["digit"] or 0)
        if not bottom or abs(power) > 2 * _MAX_DIGITS:
            return None
        value = _fraction(match["top"] or match["t"] or match["number"]) / bottom * Fraction(10) ** power
        exact = "." not in match[0]
    return Literal(-value if match["sign"] == "-" else value, exact)


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))


def without_units(text: str) -> str:
    r"""Return a value without the unit after it: 5 of `5\text{ cm}^2`, `5 cm` and `5 apples`, 5000000 of 5 million.

    A text that changes the value stays, such as `7\text{ or more}`; so does the t of 3t, which may be a variable.
    """
    if _QUALIFIED.search(text):
        return text
    scaled = _SCALED.match(text)
    if scaled is not None:
        number = _fraction(scaled[1]) * _SCALES[scaled[2]]
        return str(number.numerator) if number.denominator == 1 else text
    value = _UNITS.sub("", text)
    return value if value != text and value[-1:] in tuple("0123456789})!") else text


def without_percent(text: str) -> tuple[str, bool]:
    """Return the text before a percent sign at its end, and whether there is one."""
    shorter = _PERCENT.sub("", text)
    return shorter, shorter != text


def verbatim(text: str) -> str | None:
    r"""Return what is compared letter by letter of an answer that is no algebra, in one spelling; None for algebra.

    These are clock times, dates, numerals with a base, congruences, lists with an ellipsis, `\neq`, and words.
    """
    plain = " ".join(_TEXT.sub(r" \1 ", text).replace(r"\ ", " ").split())
    tight = re.sub(r"\\[,;:! ]|\s|~", "", _DOTS.sub("...", plain))
    if _QUALIFIED.search(plain):
        return tight.lower()
    if r"\equiv" in plain or _MODULUS.search(plain) is not None:
        return _congruence(plain)
    if "..." in tight:
        return tight.strip("{}$")
    if _NOT_EQUAL.search(plain):
        left, _, right = _NOT_EQUAL.sub("≠", tight, count=1).partition("≠")
        return f"{left or 'x'}≠{right}"
    return _time(plain) or _numeral(plain) or _words(plain)


def _time(text: str) -> str | None:
    """Return a clock time or a date without leading zeros."""
    if (clock := _CLOCK.fullmatch(text)) is not None:
        hours, minutes, seconds, half = clock.groups()
        return f"{int(hours)}:{minutes}:{seconds or '00'}{(half or '').lower()}"
    date = _DATE.fullmatch(text)
    return None if date is None else "-".join(str(int(part)) for part in date.groups() if part)


def _numeral(text: str) -> str | None:
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    name = (match[2] or match[3]).lower()
    base = _BASES.get(name) or (int(name) if name.isdecimal() else 0)
    digits = match[1].lower()
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return f"{digits.lstrip('0') or '0'}_{base}"


def _congruence(text: str) -> str:
    """Return left side, residue and modulus, the residue in [0, modulus) where both are integers."""
    modulus = _MODULUS.search(text)
    parts = _CONGRUENT.split(text[: modulus.start()] if modulus else text)
    left, right = ("", parts[0]) if len(parts) == 1 else (parts[0], parts[-1])
    left, right, size = ("".join(part.split()) for part in (left, right, (modulus[1] or modulus[2]) if modulus else ""))
    if re.fullmatch(r"-?\d{1,18}", right) and re.fullmatch(r"[1-9]\d{0,17}", size):
        right = str(int(right) % int(size))
    return f"{left}≡{right.strip('()')} mod {size}"


def _words(plain: str) -> str | None:
    """Return words as they are read, in lower case; None for single letters, products of variables and formulas.

    A run of capitals, or of four letters and more, is a word: its letters have an order. Shorter runs are products.
    """
    bare = re.sub(r"\\[a-zA-Z]+", " ", plain)
    found = [word for word in _WORD.findall(bare) if not _NAMES.fullmatch(word.lower())]
    named = any(len(word) >= 4 or word != word.lower() or word in _SHORT_WORDS for word in found)
    if not named or re.search(r"[=^_+*/<>\\{}|]", plain) or re.match(r"[-+]?[$€£¥]?[\d.]", plain):
        return None
    return " ".join(re.sub(r"[^\w\s-]", " ", plain.lower()).split())


def with_variable(text: str, other: str) -> str:
    r"""Return `\ge 7` with a variable before it: that of the other answer where it has one alone, else x."""
    if _RELATION.match(text) is None:
        return text
    names = set(re.findall(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])", re.sub(r"\\[a-zA-Z]+", " ", other)))
    return f"{names.pop() if len(names) == 1 else 'x'} {text}"


def sides(text: str) -> list[str]:
    """Return the sides of a chain of equations, such as `x = 3 + 4 = 7`; a text without `=` is its only side."""
    return [text] if re.search(r"[,;]|\\begin|\\text", text) else re.split(r"(?<![<>!\\:])=(?!=)", text)
