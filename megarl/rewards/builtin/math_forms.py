r"""Classifies answers: a written number, a form that algebra would misread, or an expression. Pure.

math-verify reads ABC as a product, 2:15 as a quotient, 2024-03-05 as a difference, and it drops the base of 1101_2, the
modulus of a congruence and the relation of `\ge 7`. Such answers are compared as text.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from megarl.rewards.builtin.math_text import clean

_MAX_CHARACTERS = 500  # longer answers go to math-verify unchanged
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
    r"(?:\s|\\[,;: ]|~)*(?:\\?%|(?<![a-zA-Z])(?:per\s?cent|pct)|\\(?:text|mathrm)\{\s*(?:per\s?cent|pct|\\?%)\s*\})\s*$"
)

_TEXT = re.compile(r"\\(?:text|mathrm|textnormal|mbox|operatorname)\s*\{([^{}]*)\}")
_CLOCK = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))?\s*(?:([ap])\.?\s?m\.?)?", re.IGNORECASE)
_RATIO = re.compile(r"\d{1,9}(?:\s*:\s*\d{1,9}){2,}")
_MONTHS = [
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
]  # fmt: skip
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_DAY_OF_MONTH = re.compile(
    rf"(?:([A-Za-z]{{3,9}})\.?\s+{_DAY}|{_DAY}\s+(?:of\s+)?([A-Za-z]{{3,9}})\.?)(?:,?\s+(\d{{4}}))?"
)
_DATE = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})|(\d{1,2})[-/.](\d{1,2})[-/.](\d{4}|\d\d)")
_NUMERAL = re.compile(
    r"(?:\(|\\overline\s*\{)?([0-9][0-9A-Za-z]*|[0-9A-Fa-f]{2,})[)}]?"
    r"(?:\s*_\s*(?:\{\s*(?:base\s*)?\(?(\w+)\)?\s*\}|(\d))|\s*\(?\s*(?:in )?base[\s~-]*(\w+)\s*\)?)"
)
_POINTS = r"\s*\{?\s*\(?(?P<%s>[A-Z]{%s})\)?\s*\}?"
_FIGURE = re.compile(
    r"(?:\\overline|\\bar|\\text\s*\{\s*(?:line )?segment\s*\})" + _POINTS % ("segment", "2")
    + r"|(?:\\(?:measured)?angle|\\text\s*\{\s*angle\s*\})" + _POINTS % ("angle", "3")
    + r"|(?:\\(?:big)?triangle(?:up)?|\\Delta|\\text\s*\{\s*triangle\s*\})" + _POINTS % ("triangle", "3")
)  # fmt: skip
_HEXADECIMAL = re.compile(r"0([xbo])([0-9a-fA-F]+)")
_BASED = re.compile(r"\d\s*_\s*\{?\d")  # a numeral with a base in an expression
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip
_MODULUS = re.compile(
    r"[(\[]?\s*(?:\\pmod|\\mod|\\bmod|(?<![a-zA-Z])mod(?:ulo)?)\s*(?:\{\s*([^{}]+?)\s*\}|([^\s{}()]+))\s*[)\]]?\s*$"
)
_CONGRUENT = re.compile(r"\\equiv|≡|=")
_DOTS = re.compile(r"\\(?:[lcdv]?dots[bcimo]?|hdots)(?![a-zA-Z])|\.\.\.")
_RELATION = re.compile(r"\\(?:geqslant|leqslant|geq|leq|ge|le|gt|lt|neq|ne)(?![a-zA-Z])|[<>]=?|!=")
# Relations, quantifiers and operators that math-verify drops.
_OTHER_RELATION = re.compile(
    r"\\(?:gg|ll|gtrsim|lesssim|forall|exists|not(?!\s*=)(?:in)?|n(?:less|gtr|leq|geq)|subset\w*|supset\w*|succ\w*|prec\w*|propto|perp|parallel"
    r"|(?:long)?(?:right|left|leftright)arrow|to|implies|iff|Rightarrow|Leftrightarrow"
    r"|min|max|gcd|lcm|sup|inf|arg(?:min|max)?|deg|det|dim|ker|hom|Pr|sgn|tr|rank|span|partial|neg|star|nmid|aleph"
    r"|(?:lim(?:sup|inf)?|sum|prod)(?!\s*[_\\]))(?![a-zA-Z])"
)
_NOT_EQUAL = re.compile(r"\\neq?(?![a-zA-Z])|!=|\\not\s*=")
_WORD = re.compile(r"[a-zA-Z]{2,}")
_NAMES = re.compile(  # words that are functions and constants
    "pi|theta|alpha|beta|gamma|delta|phi|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp|sqrt|inf(?:ty|inity)?|oo|mod|and|or"
)
_SHORT_WORDS = frozenset(("yes", "no", "odd", "not"))  # never a product of variables
_QUALIFIED = re.compile(
    r"\bor\s+(?:more|less|fewer)\b|\bat\s+(?:least|most)\b"
    r"|\b(?:remainder|more|less|fewer|over|under|increase|decrease|profit|loss|gain|discount|higher|lower)\b"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"(?:\\?[$€£¥]\s*)?({_NUMBER})\s*(?:\\text\s*\{{\s*)?({'|'.join(_SCALES)})s?(?![a-zA-Z])")
_SHORT_UNITS = "cm|mm|km|dm|kg|mg|ml|mL|ft|in|lb|hrs?|mins?|secs?|deg|sq|mph|kmh|days?|men|eggs?|cups?"
_UNIT = (
    r"(?:(?:\^\\circ\s*)?\\(?:text|mathrm|textnormal|mbox|operatorname)\s*\{[^{}]*\}|\^\\circ\s*[CF](?![a-zA-Z])"
    rf"|(?:{_SHORT_UNITS})(?![a-zA-Z])"
    r"|(?<=[\s/])[mgshlL](?![a-zA-Z])|(?<=\s)[a-zA-Z]{4,})"
)
# Units, each with its other names; compared if both answers have one.
_UNIT_NAMES = {name: names.split()[0] for names in (
    "km kilometer kilometre", "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre", "dm decimeter",
    "kg kilogram", "g gram", "mg milligram", "l liter litre", "ml milliliter millilitre", "ft foot feet",
    "in inch inche", "yd yard", "mi mile", "lb pound", "oz ounce", "h hr hour", "min minute", "s sec second", "day",
    "week", "month", "year yr", "dollar", "cent", "euro", "c celsius", "f fahrenheit",
) for name in names.split()}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}
_COMPOUND = re.compile(rf"({_NUMBER})\s*([a-zA-Z]+)\.?(?:\s*,?\s*(?:and\s+)?)")
_CHOICE, _CHOSEN = (
    re.compile(r"\(?([A-J])\)?"),
    re.compile(r"[{\s]*(?:(?i:option|choice)\s*\(?([A-J])\)?$|(?:\(([A-J])\)|([A-J])[).:](?=\s))\W*\w)"),
)
_LETTERS = re.compile(r"[A-Z](?:(?:\s|,|;|\\to(?![a-zA-Z])|\\[,;: ]|and)+[A-Z])+")
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "{": "}"}
_NO_LIST = re.compile(
    r"[=<>;]|\.\.\.|\\(?:le|ge|leq|geq|in|ne|neq|cup|cap|text|begin|infty|[lc]?dots)(?![a-zA-Z])|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])"
)
# In a list of values.
_AND_BETWEEN = re.compile(r"(?<=[\d%)}])\s*(?:\\text\s*\{\s*and\s*\}|\band\b|\\?&)\s*(?=[-+\d.(\\])")
_NAMED_UNIT = re.compile(r"\\(?:text|mathrm|textnormal|mbox|operatorname)\s*\{[^{}]*[a-zA-Z]{2}")
_UNITS = re.compile(rf"(?:(?:\s|\\[,;: ]|~|/|\\cdot(?![a-zA-Z]))*{_UNIT}(?:\s*\^\s*(?:\{{-?\d\}}|\d))?)+$")


@dataclass(frozen=True)
class Answer:
    r"""An answer in the form for comparison.

    `text`: clean LaTeX without a final percent sign. `literal`: its number, if written out. `verbatim`: its text for
    comparison letter by letter, if algebra would misread it. `unit`: its final unit, if known.
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
        value = without_units(text)
        unit = known_unit(text.removeprefix(value)) if text.startswith(value) else None
        text, percent = without_percent(value) if listed(value) is None else (value, False)
        return cls(text, percent, literal(text), unit=unit)

    @property
    def decided(self) -> bool:
        """Whether it needs no math-verify, if the other answer does not either."""
        return self.literal is not None or self.verbatim is not None

    @property
    def name(self) -> str | None:
        """One spelling of a decided answer; None for an expression."""
        if self.literal is None:
            return self.verbatim
        return str(self.literal.value) + ("%" if self.percent else "")

    def spells(self, other: Answer) -> bool:
        """Return whether two answers are equal letter for letter, or a word with and without a capital."""
        mine, theirs = ("".join(_TEXT.sub(r"\1", each.text).split()) for each in (self, other))
        word = len(mine) > 2 and (mine.istitle() or theirs.istitle())
        return self.percent == other.percent and (mine.lower() == theirs.lower() if word else mine == theirs)

    def says(self, other: Answer) -> bool:
        """Return whether two decided answers are equal."""
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
    """A number that is written out. `exact`: it has no decimal point, so it is not rounded."""

    value: Fraction
    exact: bool

    def equals(self, other: Literal) -> bool:
        """Return whether two numbers are equal; decimals if six places and six significant digits agree."""
        one, two = self.value, other.value
        if one == two or (self.exact and other.exact):
            return one == two
        return round(one, 6) == round(two, 6) and abs(one - two) <= 5 * max(abs(one), abs(two)) / 10**6

    def divided(self, by: int) -> Literal:
        """Return the number divided by `by`."""
        return Literal(self.value / by, self.exact)


def chosen(answer: str, reference: str) -> str:
    r"""Return an answer that writes choices like the reference: `C` for `\textbf{(C) }12`, `BAC` for `B, A, C`."""
    wanted, found = clean(reference), _TEXT.sub(r"\1", clean(answer))
    if _CHOICE.fullmatch(wanted) is not None:
        letter = _CHOSEN.match(found)
        return answer if letter is None else letter[1] or letter[2] or letter[3]
    if re.fullmatch("[A-Z]{2,}", wanted) and _LETTERS.fullmatch(found):
        return "".join(re.findall("[A-Z]", found))
    return ", ".join(found) if re.fullmatch("[A-Z]{2,}", found) and _LETTERS.fullmatch(wanted) else answer


def literal(text: str) -> Literal | None:
    r"""Read an integer, a decimal, a fraction of two of these, a \times 10^n or 0.\overline{3}; None for others."""
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
    r"""Return a value without its unit: 5 of `5\text{ cm}^2`, `5 cm` and `5 apples`; 5000000 of 5 million.

    Text that changes the value stays, such as `7\text{ or more}`, and so does the t of 3t, which may be a variable.
    """
    if _QUALIFIED.search(text) or _PERCENT.search(text):
        return text
    scaled = _SCALED.match(text)
    if scaled is not None:
        number = _fraction(scaled[1]) * _SCALES[scaled[2]]
        return str(number.numerator) if number.denominator == 1 else text
    value = _UNITS.sub("", text)
    is_number = value[-1:] in tuple("0123456789})!%")
    if not is_number and _NAMED_UNIT.search(text, len(value)):  # plain letters after a letter are factors
        is_number = value.endswith(r"\pi") or known_unit(text[len(value) :]) is not None  # of 3x
    return value if value != text and is_number else text


def known_unit(text: str) -> str | None:
    r"""Return the canonical name of the unit after a value: cm2 of `\text{ square cm}`; None if unknown."""
    plain = re.sub(
        r"\\(?:text|mathrm|textnormal|mbox|operatorname|cdot|circ)|[{}\\,;:~^]|\bdeg(?:rees?)?\b", " ", text.lower()
    )
    plain = re.sub(r"\bper\b", "/", re.sub(r"\b(?:kmh|kph|mph)\b", lambda match: f"{match[0][:-2]}m"[:2] + "/h", plain))
    powers: dict[str, int] = {}
    sign, power, last = 1, 1, ""
    for word in re.findall(r"[a-z]+|/|-?\d", plain):
        if word == "/":
            sign = -1
        elif word in _POWERS and not last:
            power = _POWERS[word]
        elif word in _POWERS or not word.isalpha():
            powers[last] = sign * int(_POWERS.get(word, word))
        else:
            last = _UNIT_NAMES.get(word) or _UNIT_NAMES.get(word.removesuffix("s"), "")
            powers[last] = sign * power
    return None if "" in powers or not powers else " ".join(f"{name}{powers[name]}" for name in sorted(powers))


def without_percent(text: str) -> tuple[str, bool]:
    """Return the text without a final percent sign, and whether it had one."""
    shorter = _PERCENT.sub("", text)
    return shorter, shorter != text


def verbatim(text: str) -> str | None:
    r"""Return one spelling of an answer that is not algebra, for comparison letter by letter; None for algebra.

    These are clock times, dates, numerals with a base, congruences, lists with an ellipsis, `\neq`, and words.
    """
    plain = " ".join(re.sub(r"\\[,;: ]", " ", _TEXT.sub(r" \1 ", text)).split())
    tight = re.sub(r"\\[,;:! ]|\s|~", "", _DOTS.sub("...", plain))
    if _QUALIFIED.search(plain):
        return tight.lower()
    if _OTHER_RELATION.search(plain) is not None:
        return tight
    if r"\equiv" in plain or _MODULUS.search(plain) is not None:
        return _congruence(plain)
    if "..." in tight:
        return tight.strip("{}$")
    if _NOT_EQUAL.search(plain):
        both = _NOT_EQUAL.sub("≠", plain, count=1).split("≠", 1)
        return "≠".join(sorted("".join(side.split()) or "x" for side in both))
    found = _figure(text) or _time(plain) or _date(plain) or _numeral(plain)
    return found or (tight if _BASED.search(plain) else _compound(plain)) or _words(plain)


def _figure(text: str) -> str | None:
    """Return the name of a segment, angle or triangle by its points in canonical order."""
    match = _FIGURE.fullmatch(text)
    if match is None:
        return None
    kind, points = next((kind, points) for kind, points in match.groupdict().items() if points)
    if kind == "segment":
        return points.lower()
    return f"{kind} {''.join(sorted(points)) if kind == 'triangle' else min(points, points[::-1])}"


def _time(text: str) -> str | None:
    """Return a clock time without leading zeros, after noon in 24-hour form, or a reduced ratio of several numbers."""
    clock = _CLOCK.fullmatch(text)
    if clock is not None and (clock[2] or clock[4]):
        hours, half = int(clock[1]), (clock[4] or "").lower()
        if half == "p" and hours < 12:
            hours, half = hours + 12, ""
        elif (half == "a" and hours == 12) or (not half and not hours):
            hours, half = 0, "a"
        return f"{hours}:{clock[2] or '00'}:{clock[3] or '00'}{half}"
    if _RATIO.fullmatch(text) is None:
        return None
    numbers = [int(part) for part in text.split(":")]
    return ":".join(str(number // (math.gcd(*numbers) or 1)) for number in numbers)


def _date(text: str) -> str | None:
    """Return a date as numbers without leading zeros, as year, month and day if the month has a name."""
    date, named = _DATE.fullmatch(text), _DAY_OF_MONTH.fullmatch(text)
    if date is not None:
        return "-".join(str(int(part)) for part in date.groups() if part)
    name = (named[1] or named[4]).lower() if named is not None else ""
    months = [number for number, month in enumerate(_MONTHS, start=1) if month.startswith(name)]
    if named is None or len(months) != 1:
        return None
    return "-".join(filter(None, (named[5], str(months[0]), str(int(named[2] or named[3])))))


def _compound(text: str) -> str | None:
    """Return one spelling of a value in several known units, such as 2 hours and 30 minutes."""
    parts = _COMPOUND.findall(text)
    units = [known_unit(unit) for _, unit in parts]
    if len(parts) < 2 or None in units or _COMPOUND.sub("", text):
        return None
    return " ".join(f"{number} {unit}" for (number, _), unit in zip(parts, units, strict=True))


def _numeral(text: str) -> str | None:
    if (prefixed := _HEXADECIMAL.fullmatch(text)) is not None:
        text = f"{prefixed[2]}_{ {'x': '{16}', 'b': '2', 'o': '8'}[prefixed[1]] }"
    match = _NUMERAL.fullmatch(text)
    if match is None:
        return None
    name = (match[2] or match[3] or match[4]).lower()
    base = _BASES.get(name) or (int(name) if name.isdecimal() else 0)
    digits = match[1].lower()
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in digits):
        return None
    return f"{digits.lstrip('0') or '0'}_{base}"


def _congruence(text: str) -> str:
    """Return left side, residue and modulus, with the residue in [0, modulus) if both are integers."""
    modulus = _MODULUS.search(text)
    parts = _CONGRUENT.split(text[: modulus.start()] if modulus else text)
    left, right = ("", parts[0]) if len(parts) == 1 else (parts[0], parts[-1])
    left, right, size = ("".join(part.split()) for part in (left, right, (modulus[1] or modulus[2]) if modulus else ""))
    residues = right.strip("()").split(",")
    if re.fullmatch(r"[1-9]\d{0,17}", size):
        residues = [str(int(each) % int(size)) if re.fullmatch(r"-?\d{1,18}", each) else each for each in residues]
    return f"{left if len(left) > 1 else ''}≡{','.join(sorted(residues))} mod {size}"


def _words(plain: str) -> str | None:
    """Return words in lower case; None for single letters, products of variables and formulas.

    A run of capitals, or of at least four letters, is a word, whose letters have an order. Shorter runs are products.
    """
    bare = re.sub(r"\\[a-zA-Z]+", " ", plain)
    found = [word for word in _WORD.findall(bare) if not _NAMES.fullmatch(word.lower())]
    named = any(len(word) >= 4 or word != word.lower() or word in _SHORT_WORDS for word in found)
    if not named or re.search(r"[=^_+*/<>\\{}|]", plain) or re.match(r"[-+]?[$€£¥]?[\d.]", plain):
        return None
    return " ".join(re.sub(r"[^\w\s-]|\band\b", " ", plain.lower()).split())


def with_variable(text: str, other: str) -> str:
    r"""Return `\ge 7` with a variable before it: the other answer's, if it has only one, else x."""
    if _RELATION.match(text) is None:
        return text
    names = set(re.findall(r"(?<![a-zA-Z\\])[a-zA-Z](?![a-zA-Z])", re.sub(r"\\[a-zA-Z]+", " ", other)))
    return f"{names.pop() if len(names) == 1 else 'x'} {text}"


def sides(text: str) -> list[str]:
    """Return the sides of a chain of equations, such as `x = 3 + 4 = 7`; a text without `=` is its only side."""
    return [text] if re.search(r"[,;]|\\begin|\\text", text) else re.split(r"(?<![<>!\\:])=(?!=)", text)


def listed(text: str) -> tuple[str, list[str]] | None:
    r"""Return the opening bracket ("" for none) and the elements of a list, tuple or set of values.

    Returns None for equations, relations, and lists with words or dots, which are left to algebra.
    """
    text = re.sub(r"^[a-zA-Z]\s*=(?=[^=<>]*$)", "", _AND_BETWEEN.sub(",", text))
    if _NO_LIST.search(text) is not None:
        return None
    text = re.sub(r"\\[,;:! ]", " ", text).strip()
    opened = re.match(r"\(|\[|\\?\{", text)
    bracket = opened[0] if opened is not None and text.endswith(_CLOSING[opened[0]]) else ""
    parts = _elements(text[len(bracket) : len(text) - len(bracket)])
    if parts is None:  # as of (1,2),(3,4)
        bracket, parts = "", _elements(text)
    return None if parts is None or len(parts) < 2 else (r"\{" if bracket == "{" else bracket, parts)


def _elements(text: str) -> list[str] | None:
    """Split a text at the commas outside brackets; None if the brackets do not match."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
        parts = [*parts, ""] if letter == "," and not depth else [*parts[:-1], parts[-1] + letter]
    return None if depth else [part.strip() for part in parts]
