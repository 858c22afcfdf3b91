r"""Normalizes a final answer, in LaTeX or plain text, without changing its value. Pure.

math-verify reads clean LaTeX well. It misreads other common forms: thin spaces between thousands, e-notation, mixed
numbers, `3*pi`, typographic signs, Markdown.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SIGNS = {
    **dict.fromkeys("−–‐‑‒", "-"),
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "∙": r"\cdot ",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "π": r"\pi ",
    "∞": r"\infty ",
    "≤": r"\le ",
    "⩽": r"\le ",
    "≥": r"\ge ",
    "⩾": r"\ge ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "≡": r"\equiv ",
    "∅": r"\emptyset ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "±": r"\pm ",
    "…": r"\ldots ",
    "⋯": r"\ldots ",
    **dict.fromkeys("°º˚", r"^\circ "),
    "→": r"\to ",
    "⇒": r"\Rightarrow ", "∨": r"\lor ", "∧": r"\land ",
    "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "ℓ": r"\ell ",
    "∶": ":",
    **dict.fromkeys("✓✔✅", ""),
    "∈": r"\in ",
    "∖": r"\setminus ",
    "△": r"\triangle ",
    "∠": r"\angle ",
    "•": r"\cdot ",
    "∣": "|",
    "′": "'",
    "“": '"',
    "”": '"',
    "。": ".",
    "、": ",",
    **{unicodedata.lookup(f"GREEK SMALL LETTER {name.upper()}"): rf"\{name} " for name in (
        "alpha", "beta", "gamma", "delta", "theta", "phi", "sigma", "omega",
    )},
}  # fmt: skip
_VULGAR = re.compile("[¼-¾⅐-⅞]|[⁰¹²³⁴-⁹]+[⁄∕][₀-₉]+")  # such as ½; Unicode knows its numerator and denominator

_JOINS = frozenset(("and", "or", "percent", "pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "infinity"))
_GAP = r"(?:\\[,;:! ]|~|(?:\\(?:text|mathord|mathpunct))?\{,\}|\{\\,\}|,\\!|\\thinspace(?![a-zA-Z])|['\u2019])"
_THOUSANDS = re.compile(rf"(?<![\d.,\w])[1-9]\d{{0,2}}(?:{_GAP}\s?\d{{3}})+(?!\d)")
_WHOLE_THOUSANDS = re.compile(
    r"([-+]?[$€£¥]?)([1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+|(?:_\d{3})+|(?:\.\d{3}){2,}))"
    r"((?:\.\d+)?(?:\s*\\?%|\s*\\?[a-zA-Z][^,;]*)?)"
)
# In a list with spaces after its commas.
_LISTED_THOUSANDS = re.compile(r"(?<![\d,.])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_GAPS_IN_DECIMALS = re.compile(rf"(?<![\d.])\d*\.\d{{3}}(?:{_GAP}\d{{3}})*{_GAP}\d{{1,3}}(?!\d)")
E_NOTATION = re.compile(r"(?<![\w.\\}])(?:\d+\.\d+[eE][+-]?\d+|\d+[eE](?:[+-]\d{2,}|\d{2,}))(?![\w.]*[\w(])")
_ONE_E_NOTATION = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][+-]?\d+")
# Separate values: 3 4 is neither a sum nor a product.
_NEIGHBOURS = re.compile(r"(?<![\w.^}\\])([-+]?\d+(?:\.\d+)?)(?:\s|\\[,;: ]|~|\\q?quad(?![a-zA-Z]))+(?=\d)")
_MIXED = re.compile(
    r"(?<![\d.\w}/^)])(\d+)(?:\s|\\[,;: ]|~)*"
    r"(?:(?<=[\s~,;:])(?P<a>\d+)\s?/\s?(?P<b>\d+)(?![\d/.])|\\[dtc]?frac\s*(?:\{\s*(?P<c>\d+)\s*\}\s*\{\s*(?P<d>\d+)\s*\}|(?P<e>\d)(?P<f>\d)))"
)
_FORMATS = re.compile(
    r"\\fcolorbox\s*\{[^{}]*\}\s*\{[^{}]*\}|\\(?:textcolor|colorbox|color|[hv]?phantom|label|tag\*?|enclose)"
    r"\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|\\bbox\s*\[[^\]]*\]"
    r"|\\(?:[bx]?cancel|sout|st)\s*\{(?:[^{}]|\{[^{}]*\})*\}|~~[^~]+~~"
    r"|\\(?:begin|end)\s*\{(?:aligned|align\*?|gathered|equation\*?|split)\}"
    r"|\\(?:mathbf|boldsymbol|bm|pmb|underline|textbf|textit|mathit|emph|bold|text(?:rm|sf|tt|up|md)|math(?:op|sf|tt|ord|bin|punct)|smash|circled)"
    r"(?![a-zA-Z])|\\(?:left|right)\s*\."
    r"|\\(?:ensuremath|hbox|framebox|tiny|small|normalsize|large|Large|LARGE|huge|Huge|nonumber|notag|newline|hfill|checkmark)(?![a-zA-Z])"
    r"|\\(?:displaystyle|textstyle|left|right|bigl|bigr|Bigl|Bigr|big|Big|mathstrut|limits|rm|bf)(?![a-zA-Z])|\\[()\[\]]"
    r"|(?:\\q?quad|\s)*\\(?:blacksquare|square|qed|Box)\s*$"
)
_LETTER = re.compile(
    r"\\(?:mathrm|operatorname|text|textnormal)\s*\{\s*([ei])\s*\}"
    r"|\{\s*\\rm\s+([ei])\s*\}|\\mathrm\s+([ei])(?![a-zA-Z])"
)
_TEXT_NUMBER = re.compile(r"\\(?:text|mathrm|textnormal|mbox)\s*\{\s*([-+]?[\d.,]+(?:\s*\\?%)?)\s*\}")
_PLAIN_NAMES = re.compile(
    r"(?<![a-zA-Z\\])(pi|Pi|PI|theta|alpha|beta|gamma|delta|epsilon|lambda|mu|rho|sigma|tau|phi|omega|oo|infinity|infty"
    r"|a(?:rc)?(?:sin|cos|tan)|sin|cos|tan|cot|sec|csc|log|ln|exp)(?![a-zA-Z])"
)
_LATEX_NAMES = {"oo": "infty", "infinity": "infty", "Pi": "pi", "PI": "pi",
                "asin": "arcsin", "acos": "arccos", "atan": "arctan"}  # fmt: skip
_NESTED = r"((?:[^{}]|\{[^{}]*\})*)"
# TeX's old infix commands, in braces or as a whole answer.
_INFIX = re.compile(rf"\{{{_NESTED}\\(over|choose)(?![a-zA-Z]){_NESTED}\}}")
_SPACE = r"(?:\\[,;:! ]|~|\\(?:q?quad|thinspace)(?![a-zA-Z]))"
# Functions in plain text, and the LaTeX around their arguments.
_CALLS = {"sqrt": (r"\sqrt{", "}"), "√": (r"\sqrt{", "}"), "cbrt": (r"\sqrt[3]{", "}"), "∛": (r"\sqrt[3]{", "}"),
          "∜": (r"\sqrt[4]{", "}"), "abs": ("|", "|"), "floor": (r"\lfloor ", r"\rfloor "),
          "ceil": (r"\lceil ", r"\rceil ")}  # fmt: skip
_CALL = re.compile(r"(?:\\?(?<![a-zA-Z])(sqrt|cbrt)|([√∛∜]))\s*(?=[(\d\w])|(?<![a-zA-Z\\])([aA]bs|floor|ceil)\s*(?=\()")
_ANSWER = re.compile(
    r"(?i)(?:\b(?:answers?|(?:correct|right) (?:option|choice)"
    r"|antwort|respuesta|réponse|risposta|resposta|ответ|jawaban)\b"
    r"|(?<![a-z])answers?)(?:\s+\w+){0,4}?\s*(?:\*\*)?\s*(?:\b(?:is|are|be)\b|[:=])\s*(?:\*\*)?:?"
    r"|(?:答案|答え|答|정답|답)(?:就?是|为|為|は)?\s*[:：]?"
)
_TAGGED = re.compile(r"(?is)<(\w*answer)>((?:(?!<\1>).)*?)</\1>")
_ASIAN = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
_SENTENCE_END = re.compile(r"\.(?=\s|\*|$)|\n|;\s|,\s(?=[a-z]{3,})|\s(?=(?:because|since|as|so|where|which|for)\b)")
_NUMBER = (
    r"(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|[1-9]\d{0,2}(?: \d{3})+(?!\d|-?[a-zA-Z])(?:\.\d+)?"
    r"|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
)
_COUNTS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_ORDINAL = r"\d{1,2}(?:st|nd|rd|th)?"
# Words that change the meaning of the number after them.
_QUALIFIER = re.compile(
    r"(?i)(?:not|neither|either|at (?:least|most)|(?:greater|less|more|fewer|larger|smaller|higher|lower) than"
    r"|over|under|above|below|between)\b"
)
_CANDIDATE = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|(?<![\\\d])\$(?P<b>[^$\n]+)\$|\\\[(?P<c>.*?)\\\]|\\\((?P<d>.*?)\\\)"
    r"|(?P<e>[-+\w.(]*\\(?:d?t?frac|sqrt|pi|infty|times|cdot)(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|[^\s{}])*)"
    rf"|(?P<g>(?<![\w.:])(?:\d+(?::\d+)+(?:\s*[aApP]\.?[mM]\b\.?)?|\d{{4}}-\d{{1,2}}-\d{{1,2}}(?!\d)"
    rf"|(?:{_MONTH}\s+{_ORDINAL}|{_ORDINAL}\s+(?:of\s+)?{_MONTH})(?:,?\s+\d{{4}})?))"
    rf"|(?P<f>(?<![\w.])[-+]?(?:\\?[$€£¥])?\(?{_NUMBER}(?:\s?\d+/\d+)?(?:\s*[-+*/^]\s*\(?-?{_NUMBER}\)?)*(?:\s*(?:\\?%|percent\b))?)",
    re.DOTALL,
)
_OUTER = (("$$", "$$"), ("$", "$"), ("**", "**"), ("__", "__"), ("`", "`"), ("*", "*"), ("_", "_"), ('"', '"'))
# Spellings in LaTeX and plain text, each with the spelling that math-verify reads.
_SPELLINGS = tuple((re.compile(pattern), spelling) for pattern, spelling in (
    (r"\\(?:text|mbox)\s*\{\s*\}|\\(?:space|en(?:space|skip)|allowbreak)(?![a-zA-Z])|\\>", r"\\ "),
    (r"(?:\\!)*,(?:\\!)+(?=\d{3}(?!\d))", "{,}"),
    (r"\\!", ""),
    (r"\\[hv]space\*?\s*\{[^{}]*\}|\\(?:[hm]skip|kern|mkern)\s*-?[\d.]+\s*(?:pt|em|ex|mu|cm|mm)", r"\\,"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"[\^_]?(?<!\\)\{\s*\}", ""),
    (r"\{(\\[ ,;:!]|\.)\}", r"\1"),
    (r"^\(([^,]*\d\s*\\?%)\)$|^<(b|strong|em|i|u)>(.*)</\2>$|^&(.*)$", r"\1\3\4"),
    # Prefixes that do not change a value.
    (r"^\s*\\(?:text|mathrm)\s*\{\s*(?i:(?:the )?(?:final )?answer(?: is)?|about|approximately)\s*:?\s*\}\s*:?", ""),
    (r"^\s*\\(?:to|implies|(?:Long)?[rR]ightarrow|therefore)(?![a-zA-Z])", ""),
    (r"^[a-zA-Z]\s*\\in\s*(?=\\?[{(\[]|\\(?:mathbb|[RZNQ](?![a-zA-Z])))", ""),
    (r"^[a-zA-Z]\s*\(\s*[a-z]\s*\)\s*=(?!.*[=<>])", ""),
    (r"\\text\s*\{\s*(\\?[$€£¥])\s*\}", r"\1"),
    (r"^\{(\w+)\}(?=_)", r"\1"),
    (r"_\s*(\\(?:text|mathrm)\s*\{[^{}]*\})", r"_{\1}"),
    # e-notation, and thousands before a factor.
    (r"(?<=\d)(?:\s|\\,)*(?:[eE]|\\(?:text|mathrm)\s*\{E\})\s*\{\s*([-+]?\d+)\s*\}", r"e\1"),
    (r"(?<=\d)\\(?:text|mathrm)\s*\{\s*[eE]([-+]?\d+)\s*\}|(?<=\d)\s+E([-+]\d+)", r"e\1\2"),
    (r"(?<=\d)\\(?:text|mathrm)\s*\{\s*(?:E|[eE]\s*([-+]))\s*\}\s*([-+]?\d+)", r"e\1\2"),
    (r"(?<![\d,.])([1-9]\d{0,2}),(0\d\d)(?!,?\d)", r"\1\2"),
    (r"\\(?:nice|s|flat|x)frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dtc]?frac\s*(\d)\s+(\d)", r"\\frac{\1}{\2}"),
    (r"\\[dtc]?frac\s*(\\[a-zA-Z]+|[a-z])\s*(\d|[a-z])(?![a-zA-Z])", r"\\frac{\1}{\2}"),
    (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
    (r"√\s*(?=\{)", r"\\sqrt"),
    (r"(?<=!)(?:\\[,;: ]|\s)+(?=\d)", r"\\cdot "),
    # Names of functions, sets and symbols.
    (r"\\(?:mathrm|operatorname|text)\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)|ln|log|exp)\s*\}(?:\\[,;: ]|\s)*",
     r"\\\1 "),
    (r"\\(?:(?:mathrm|operatorname|text)\s*\{\s*(arc)?tg\s*\}|(arc)?tg(?![a-zA-Z]))", r"\\\1\2tan "),
    (r"\\(?:(?:mathrm|operatorname|text)\s*\{\s*(arc)?ctg\s*\}|(arc)?ctg(?![a-zA-Z]))", r"\\\1\2cot "),
    (r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![a-zA-Z])", r"\\ln "),
    (r"\\lg(?![a-zA-Z])", r"\\log_{10} "),
    (r"\\var(phi|epsilon|theta)(?![a-zA-Z])", r"\\\1 "),
    (r"\\imath(?![a-zA-Z])", "i"),
    (r"\\(?:mathbb|Bbb)\s*\{?\s*([A-Z])(?![a-zA-Z])\s*\}?|\\([RZNQ])(?![a-zA-Z])", r"\\mathbb{\1\2}"),
    (r"(\\mathbb\{[A-Z]\})\s*(?:-|\\backslash)\s*(?=\\\{)", r"\1\\setminus "),
    (r"\\(?:long)?rightarrow(?![a-zA-Z])", r"\\to "),
    (r"\\(?:lor|vee)(?![a-zA-Z])(?=[^=<>]*(?:[=<>]|\\[gln]e))", r"\\text{ or }"),
    (r"\\(?:land|wedge)(?![a-zA-Z])(?=[^=<>]*(?:[=<>]|\\[gln]e))", r"\\text{ and }"),
    (r"(\\sqrt\s*\[\d+\])\s*(\w)", r"\1{\2}"),
    (r"\^\s*\{?(\d+)\}?\s*/\s*_\s*\{?(\d+)\}?", r"\1/\2"),
    (r"\\uppi(?![a-zA-Z])", r"\\pi "),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"^\s*[—―]\s*(?=[\d.$\\(])", "-"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
    (r"(?<=\d)\s*\((?=\d+/\d+\)|\\[dtc]?frac)", r"\\cdot ("),  # not a mixed number
    (r"(?<=\d)\s*(?:\{:\}|\\colon(?![a-zA-Z])|\\text\s*\{:\}|(?:\\!)?:(?:\\!)?)\s*(?=\d)", ":"),
    (r"\\d?frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}",
     r"\\text{\1/\2}"),
    (r"(\\(?:text|mathrm)\s*\{[^{}]*?)\s*\^\s*\{?(-?\d)\}?\s*\}", r"\1}^{\2}"),
    (r"(?i:\\?text\s*\{\s*(?:all )?real(?: number)?s\s*\}|^all real(?: number)?s$)", r"\\mathbb{R}"),
    (r"(?<=[)\]])\s*(?:U\s*(?=[(\[])|\\text\s*\{\s*or\s*\}\s*(?=[(\[].*\\infty))", r"\\cup "),
    (r"^-\\infty\s*<\s*[a-z]\s*<\s*\+?\\infty$", r"\\mathbb{R}"),
    (r"^([^<>]+(?:<|\\le(?:q|qslant)?(?![a-zA-Z]))\s*[a-z])\s*<\s*\+?\\infty$", r"\1"),
    (r"^-\\infty\s*<\s*([a-z]\s*(?:<|\\le).+)$", r"\1"),
    # An interval in French notation, and the set of numbers for which a relation holds.
    (r"((?:^|\\cup)\s*)\]([^\[\](){}]+[,;][^\[\](){}]+)(?=[\[\]]\s*(?:$|\\cup))", r"\1(\2"),
    (r"((?:^|\\cup)\s*[(\[][^\[\](){}]+[,;][^\[\](){}]+)\[(?=\s*(?:$|\\cup))", r"\1)"),
    (r"^\\?\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid(?![a-zA-Z])|[|:])(.*)\\?\}$", r"\1"),
    (r"^([(\[][^,;]*);([^,;]*[)\]])$", r"\1,\2"),
    # Repeating decimals.
    (r"(\d*\.\d*)(?:\((\d+)\)|\\(?:bar|overline)\s*\{?\s*(\d+)\s*\}?)$", r"\1\\overline{\2\3}"),
    (r"(?<=[\d.])\\dot\s*\{?(\d)\}?$", r"\\overline{\1}"),
    (r"(?<=[\d.])\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?$", r"\\overline{\1\2\3}"),
    (r"^([-+]?\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,})\3+)\s*(?:\.{3,}|\\[lc]?dots)$", r"\1\\overline{\2\3}"),
    (r"^([-+]?\d*\.\d+)\s*(?:\.{3,}|\\[lc]?dots)$", r"\1"),
))  # fmt: skip
_IN_DEGREES = re.compile(
    r"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*(?:\{\d\}|\d))?)\s*(?:\(\s*([\d.]+)\s*\^\\circ\s*\)|([\d.]+)\s*\^\\circ)"
)


def clean(text: str) -> str:
    """Return an answer as clean LaTeX of the same value: no colors, Markdown or typographic signs, plain numbers."""
    text = typography(text)
    text = _LETTER.sub(lambda match: match[1] or match[2] or match[3], _TEXT_NUMBER.sub(r"\1", text))
    text = _FORMATS.sub("", re.sub(r"(?<![_^}a-zA-Z])\{\s*\\rm\s*~?([a-zA-Z]{2}[^{}]*)\}", r"\\text{\1}", text))
    text = re.sub(r"(?<=[,+])\s*\.{3,}", r"\\ldots ", text)  # of a list; other final periods mean nothing
    text = _prefixed(text).strip().strip("$").strip()
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _undressed(text)
    word = re.sub(r"^\\(?:text|mathrm)\s*\{([^{}]*)\}$", r"\1", text).strip().lower()
    text = str(_COUNTS.index(word)) if word in _COUNTS else text
    text = re.sub(
        r"\^\s*(?:\{\s*\^?\s*(?:\\(?:circ|degree)|o)\s*\}|\\(?:circ|degree)(?![a-zA-Z])|o(?![a-zA-Z]))|\\degree(?![a-zA-Z])",
        r"^\\circ",
        text,
    )
    text = _IN_DEGREES.sub(lambda match: rf"{match[1]}(\frac{{{match[2] or match[3]}\pi}}{{180}})", text)
    text = plain_numbers(text)
    whole = _WHOLE_THOUSANDS.fullmatch(text)
    if whole:
        text = whole[1] + re.sub("[ ,_.]", "", whole[2]) + whole[3]
    if re.search(r",\s", text):
        text = _LISTED_THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    if _ONE_E_NOTATION.fullmatch(text):
        text = decimal(text)
    text = _NEIGHBOURS.sub(r"\1, ", text)
    descending = re.split(r"(>|\\ge(?:q|qslant)?(?![a-zA-Z]))", text)
    if len(descending) > 3 and not re.search(r"[<=,;]|\\le", text):  # 5 > x > 1 is 1 < x < 5
        text = "".join(reversed(descending)).replace(">", "<").replace(r"\ge", r"\le")
    return _latex_names(text).strip()


def stated_answer(text: str) -> str | None:
    """Return the final answer of a text without a box, or None.

    That is the content of the last <answer>, or the text after the last "the answer is": the rest of the sentence if it
    is a value or a few words, else the first value. Without such words it is the last formula or number.
    """
    if (tagged := tagged_answer(text)) is not None:
        return tagged
    text = _ANSWER.sub(lambda match: match[0] if match[0].isascii() else " answer: ", text)
    text = _ASIAN.sub(" ", re.sub("[。，；]", ". ", text))
    text = plain_numbers(typography(text))
    places = [match.end() for match in _ANSWER.finditer(text)]
    if not places:
        values = _values(text) or re.findall(r"^\W*([A-Z])\W*$", text)  # a choice alone
        return values[-1] if values else None
    rest = re.sub(r"^\s*\n\s*[-*•]\s+", "", text[places[-1] :])  # a list item is not a negative number
    sentence = _undressed(_SENTENCE_END.split(rest.strip(), maxsplit=1)[0])
    if sentence.count("**") == 1:  # the other one is before the words
        sentence = sentence.removesuffix("**").strip()
    words = [word for word in re.findall(r"[^\W\d_]{2,}", re.sub(r"\\[a-zA-Z]+", " ", sentence)) if word not in _JOINS]
    if sentence and (
        not words or _QUALIFIER.match(sentence) is not None or (len(words) <= 3 and not re.search(r"[\d$\\]", sentence))
    ):
        return sentence
    values = _values(rest[:200])
    return values[0] if values else None


def tagged_answer(text: str) -> str | None:
    """Return the content of the last pair of <answer> tags; None without one."""
    found = _TAGGED.findall(text)
    return found[-1][1].strip() if found else None


def states_answer(text: str) -> bool:
    """Return whether a text says what its answer is."""
    return _ANSWER.search(text) is not None


def _values(text: str) -> list[str]:
    """Return the formulas and numbers of a text, in order."""
    found = []
    for match in _CANDIDATE.finditer(text):
        formula = next((match[name] for name in "abcd" if match[name]), None)
        if formula is not None and re.search(r"(?<![\\a-zA-Z{])[a-z]{4,}\s", formula):
            found += _values(formula)  # not a formula, but words between two prices
        else:
            found.append((formula or match[0]).strip())
    return found


def typography(text: str) -> str:
    """Return the text with typographic signs as LaTeX: superscripts, roots, fractions, spaces, digits."""
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match[0]).replace("⁄", "/"), text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    return "".join(map(_typed, text))


@lru_cache(maxsize=4096)
def _typed(letter: str) -> str:
    """Return a character as LaTeX or ASCII; "" for one without width."""
    if letter.isascii() or letter in _SIGNS:
        return _SIGNS.get(letter, letter)
    kind, plain = unicodedata.category(letter), unicodedata.normalize("NFKC", letter)
    if kind in ("Cf", "Zs"):
        return "" if kind == "Cf" else r"\,"
    if kind == "Nd":
        return str(unicodedata.decimal(letter))
    return rf"\mathbb{{{plain}}}" if "DOUBLE-STRUCK" in unicodedata.name(letter, "") else _SIGNS.get(plain, plain)


def plain_numbers(text: str) -> str:
    """Return the text without gaps in numbers, with e-notation as decimals and mixed numbers as fractions."""
    for pattern in (_THOUSANDS, _GAPS_IN_DECIMALS):
        text = pattern.sub(lambda match: re.sub(rf"{_GAP}\s?", "", match[0]), text)
    text = E_NOTATION.sub(lambda match: decimal(match[0]), text)
    return _MIXED.sub(_improper, text)


def decimal(text: str) -> str:
    """Return a number in e-notation as a decimal; unchanged if that is longer than any real answer."""
    mantissa, exponent = re.split("[eE]", text)
    if len(exponent) > 4 or abs(int(exponent)) > 30 or len(mantissa) > 300:
        return rf"{mantissa}\times 10^{{{exponent}}}"
    value = Fraction(mantissa) * Fraction(10) ** int(exponent)
    digits = max(0, len(mantissa.partition(".")[2]) - int(exponent))
    sign, value = "-" if value < 0 else "", abs(value)
    whole, rest = divmod(value.numerator * 10**digits // value.denominator, 10**digits)
    return f"{sign}{whole}" + (f".{rest:0{digits}d}" if digits else "")


def _improper(match: re.Match[str]) -> str:
    """Return 7 1/4 as 29/4; unchanged if the fraction is not proper."""
    whole = int(match[1])
    part, parts = (
        (int(match[a] or 0) for a in "ab") if match["a"] else (int(match[a] or match[b]) for a, b in ("ce", "df"))
    )
    if not 0 < part < parts:
        return match[0]
    return rf"\frac{{{whole * parts + part}}}{{{parts}}}"


def _undressed(text: str) -> str:
    """Return the text without surrounding Markdown, dollar signs and final punctuation."""
    before = ""
    while before != text:
        before, text = text, re.sub(r"(?:(?<!\\)[.,;:]|\s)+$", "", text).strip()
        text = re.sub(rf"^{_SPACE}+|(?:{_SPACE}|\\)+$", "", text)
        for start, end in _OUTER:
            if len(text) > len(start) + len(end) and text.startswith(start) and text.endswith(end):
                inner = text[len(start) : -len(end)]
                text = inner if start not in inner else text
    return _unbraced(text)


def _prefixed(text: str) -> str:
    r"""Return {1 \over 2} as \frac{1}{2}, and {5 \choose 2} as \binom{5}{2}."""
    if _INFIX.search(text) is None and _INFIX.fullmatch(whole := f"{{{text}}}"):
        text = whole
    return _INFIX.sub(lambda match: rf"\{'frac' if match[2] == 'over' else 'binom'}{{{match[1]}}}{{{match[3]}}}", text)


def _unbraced(text: str) -> str:
    """Return {8} as 8: a removed command leaves braces around a whole answer."""
    while text.startswith("{") and text.endswith("}") and text.count("{") == text.count("}") == 1:
        text = text[1:-1].strip()
    return text


def _latex_names(text: str) -> str:
    """Return plain text such as `3*pi` as LaTeX: names of functions and constants, roots and powers."""
    text = re.sub(r"\*\s*I(?![a-zA-Z])", "i", text.replace("**", "^")).replace("*", r"\cdot ")
    text = re.sub(r"\^\s*(-\s*(?:\d+|[a-zA-Z]))", r"^{\1}", text)
    text = re.sub(r"(?<![a-zA-Z\\])log_?(\d+)\s*(?=\()", r"\\log_{\1}", text)
    text = _PLAIN_NAMES.sub(lambda match: rf"\{_LATEX_NAMES.get(match[1], match[1])} ", text)
    start = 0
    while (match := _CALL.search(text, start)) is not None:
        end = _argument_end(text, match.end())
        inner = text[match.end() : end]
        inner = inner[1:-1] if inner.startswith("(") else inner
        before, after = _CALLS[match[1] or match[2] or match[3].lower()]
        text, start = f"{text[: match.start()]}{before}{inner}{after}{text[end:]}", match.start() + len(before)
    return text


def _argument_end(text: str, start: int) -> int:
    """Return where the argument of a root ends: after its bracket, its number or its letter."""
    if text[start] != "(":
        number = re.match(r"\d+(?:\.\d+)?|\w", text[start:])
        return start + (number.end() if number else 1)
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place + 1
    return len(text)
