r"""What the `math` reward takes as equal and as different, by kind; docs/reference/math-answers.md shows the table.

    python -m tests.support.rewards.math_decisions     # writes the table into the page

The pairs are a reference and the content of the response's box. math-verify alone decides most of them otherwise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import ROOT

PAGE = ROOT / "docs" / "reference" / "math-answers.md"
START, END = "<!-- decisions of math: start -->\n", "<!-- decisions of math: end -->\n"
_SHOWN = 3  # pairs of each kind in the table

Pair = tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """One kind of answer: the rule, pairs that are equal and pairs that are not."""

    rule: str
    equal: tuple[Pair, ...]
    different: tuple[Pair, ...]


DECISIONS = (
    Kind(
        "A percentage equals its fraction, and a bare number without the sign",
        (
            (r"15\%", "0.15"),
            ("3/20", r"15\%"),
            ("15", r"15\%"),
            ("0.15", "15%"),
            (r"150\%", "1.5"),
            (r"33\frac{1}{3}\%", r"\frac{1}{3}"),
            (r"\frac{100}{3}\%", r"33\frac13\%"),
            (r"0.5\%", "0.005"),
            (r"7\%", r"7\text{ percent}"),
            (r"7\%", r"7.0 \%"),
            ("7 percent", "0.07"),
            (r"7\%", "7 per cent"),
            (r"7\%", r"7\%\text{ of the boxes}"),
            (r"7\%, 9\%", r"9\%, 7\%"),
            (r"7\%, 9\%", "0.07, 0.09"),
            (r"7\%", r"\text{7\%}"),
            (r"(10\%, 20\%)", "(0.1, 0.2)"),
            (r"10\%, 20\%", r"10\% \text{ and } 20\%"),
            (r"33.3\%", r"\text{about } 33.3\%"),
        ),
        (
            (r"15\%", r"0.15\%"),
            ("0.15", "15"),
            (r"35\%", "3.5"),
            ("20", r"0.2\%"),
            (r"12\%", r"13\%"),
            (r"7\%, 9\%", r"8\%, 9\%"),
            (r"(10\%, 20\%)", r"(20\%, 10\%)"),
            (r"7\%\text{ increase}", r"7\%\text{ decrease}"),
        ),
    ),
    Kind(
        "`e` between digits is a power of ten",
        (
            ("3e-05", "0.00003"),
            ("2.5e-06", r"2.5\times 10^{-6}"),
            ("1e+16", "10000000000000000"),
            ("0.00012", "1.2e-4"),
            ("6.02e23", "6.02E23"),
            ("120000", r"1.2\times 10^5"),
            ("5e-324", r"5\times10^{-324}"),
            ("2-e", "-e+2"),
            ("0.0032", "3.2 x 10^-3"),
            ("0.00032", r"3.2\mathrm{e}{-4}"),
            ("4e-05, 6e-05", "0.00004, 0.00006"),
            ("4.2e-07", r"4.2\text{e-}7"),
            ("4.2e-07", r"4.2\text{E}-7"),
        ),
        (("1e-05", "e-5"), ("1e-07", "0.000001"), ("3e-05", "3"), ("2e5", "2e4")),
    ),
    Kind(
        "Gaps between groups of three digits mean nothing",
        (
            ("12000", r"12\,000"),
            ("12000", "12~000"),
            ("1234567", r"1\,234\,567"),
            ("12000", r"12\ 000"),
            ("12000", r"12\;000"),
            ("12000", r"12,\!000"),
            ("12000", "12 000"),
            ("12000", "12\u202f000"),
            ("12000", "12'000"),
            ("12000.5", r"12\,000.5"),
            ("-12000", r"-12\,000"),
            (r"\$12,000", "12000"),
            ("12{,}000", "12000"),
            *(("12000", f"12{space}000") for space in "\u2002\u2005\u2007\u2008\u200a\u200b\u2060\u3000\ufeff_，"),
            ("12000", r"12\hspace{2pt}000"),
            ("12000", r"12\mathord{,}000"),
            *(("12000", rf"12{gap}000") for gap in (r"\>", "{ }", r"\space ", r"\enspace ", r"\!", r"\!,\!")),
            (r"12000\pi", "12,000π"),
            (r"\$12,000", "12 000 dollars"),
            ("1234567", "1.234.567"),
            ("0.456789", r"0.456\,789"),
            ("2.71828", r"2.718\,28"),
            ("(3,000, 4,000)", "(3000, 4000)"),
            (r"12{,}000\pi", r"12000\pi"),
        ),
        (
            ("0", r"12\,000"),
            ("45678", r"45\,679"),
            ("1", r"1\,000"),
            ("45000", "45"),
            ("0", r"12\space 000"),
            ("0", r"12\quad 000"),  # two numbers next to each other
            ("7", "3 4"),
            ("12", "3 4"),
            ("7", r"3\ 4"),
        ),
    ),
    Kind(
        "Decimals are equal if six places and six significant digits agree, exact numbers if they are the same",
        (
            ("1/3", "0.333333"),
            (r"\pi", "3.14159265"),
            (r"\frac{1}{3^{60}}", "3^{-60}"),
            ("0.00000003", r"3\times10^{-8}"),
            (r"10^{-20}", r"\frac{1}{10^{20}}"),
            (r"\sqrt2", "1.414214"),
            ("1/3", r"0.\overline{3}"),
            ("7/22", r"0.3\overline{18}"),
            ("2/3", r"0.\bar{6}"),
            ("27", "27.0"),
            ("0", "-0"),
        ),
        (
            (r"\frac{1}{3^{60}}", r"\frac{1}{3^{61}}"),
            ("0.00000003", "0.00000005"),
            ("1/3", "0.33"),
            ("0", "0.00000003"),
            (r"\{10^{-9},1\}", r"\{10^{-10},1\}"),
            (r"e^{-40}", r"e^{-41}"),
            (r"0.\overline{3}", "0.3"),
            ("123456.7", "123456.8"),
            ("1000000", "1000001"),
        ),
    ),
    Kind(
        "Words are compared as words: capitals, and four letters and more; shorter runs are products",
        (
            ("CAB", r"\text{CAB}"),
            (r"\text{Monday}", "monday"),
            ("ab", "ba"),
            ("2ab", "2ba"),
            ("A", r"\text{(A)}"),
            ("A", "(A)"),
            ("A", r"\textbf{A}"),
            (r"\text{even}", "even"),
            ("CAB", "C, A, B"),
            ("CAB", r"C \to A \to B"),
            ("A, D", "AD"),
            ("C", r"\text{C. the third}"),
            ("C", r"\text{Option C}"),
            ("red", r"\text{Red}"),
            (r"\text{Ann and Bob}", r"\text{Ann}, \text{Bob}"),
            ("PQR", r"P \rightarrow Q \rightarrow R"),
            ("AB", r"\overline{AB}"),  # names of segments, angles and triangles
            ("AB", r"\text{segment } AB"),
            (r"\angle ABC", r"\angle CBA"),
            (r"\angle ABC", "∠ABC"),
            (r"\triangle ABC", r"\text{triangle } CAB"),
        ),
        (
            ("CAB", "ABC"),
            ("listen", "silent"),
            (r"\text{Monday}", r"\text{Sunday}"),
            ("FTT", "TFT"),
            ("March 5", "March 6"),
            ("even", "odd"),
            ("A", "B"),
            ("red", r"\text{der}"),
            (r"\overline{AB}", r"\overline{AC}"),
            (r"\angle ABC", r"\angle ACB"),
            (r"\angle ABC", r"\triangle ABC"),
            (r"\overline{z}", "z"),
        ),
    ),
    Kind(
        "Dates and clock times are no arithmetic",
        (
            ("2024-03-05", "2024-3-5"),
            ("3:20", "03:20"),
            ("3:20", "3:20:00"),
            ("9:05", r"9:05"),
            ("5:45 PM", "17:45"),
            ("5:45 PM", r"5\!:\!45\text{ p.m.}"),
            ("5:45", "5{:}45"),
            ("5 PM", "5:00 p.m."),
            ("5 PM", r"5:00\,\mathrm{pm}"),
            ("July 4, 2021", "2021-07-04"),
            ("4 July 2021", "July 4th, 2021"),
            ("2:3:4", "4:6:8"),
        ),
        (
            ("2024-03-05", "2024-05-03"),
            ("3:20", "6:40"),
            ("10:30", "1/3"),
            ("2024-03-05", "2016"),
            ("12/25/2023", "25/12/2023"),
            ("3:20", "3:21"),
            (r"3:20\text{ am}", r"3:20\text{ pm}"),
            ("5:45 PM", "5:45"),
            ("2:3:4", "4:3:2"),
            ("July 4, 2021", "April 7, 2021"),
        ),
    ),
    Kind(
        "A relation, an operator, the base of a numeral, a modulus and the end of a list belong to the answer",
        (
            (r"x \ge 7", r"\ge 7"),
            (r"x \equiv 2 \pmod 9", r"x \equiv 11 \pmod{9}"),
            (r"1101_{\text{two}}", "1101_2"),
            (r"x \neq 7", r"\neq 7"),
            (r"x\equiv 2 \pmod{9}", r"x \equiv 2 (\bmod 9)"),
            (r"1, 2, \ldots, n", r"1,2,\dots,n"),
            ("y>3", "3<y"),
            ("12", r"\frac{24}{2}=12"),
            ("12", r"x = 4\cdot 3 = 12"),
            ("1101_2", r"\overline{1101}_{(2)}"),
            ("1101_2", r"1101\text{ (base 2)}"),
            ("0b1101", "1101_2"),
            (r"n\equiv 2, 5\pmod 7", r"n \equiv 5, 9 \pmod 7"),
            ("0.444...", "4/9"),
            (r"0.\dot{4}", "4/9"),
            (r"x\neq 2", r"2\ne x"),
            (r"x\in\{1,2\}", r"x=1 \lor x=2"),
            (r"x\in\{1,2\}", "x = 1, 2"),
            ("1101_2", r"1101_{base\ 2}"),
            (r"\mathbb{Z}", r"x\in\Z"),
            (r"a\mid b", r"a \mid b"),
            ("a<b<c", "c>b>a"),
            ("1101_2", r"{1101}_\text{two}"),
            ("7", r"\text{The answer is }7"),
            ("7", r"\Rightarrow 7"),
            ("y=2x+1", "f(x)=2x+1"),
            (r"\max(a, b)", r"\max(a,b)"),
            ("6", r"\sum_{k=1}^3 k"),
            ("2", r"\lg 100"),
        ),
        (
            ("7", r"\ge 7"),
            ("1101_2", "1101"),
            ("12", "11=12"),
            ("7", r"x\neq 7"),
            ("7", "<7"),
            (r"\ge 7", "7"),
            (r"x>7", r"x\ge 7"),
            ("12", "10=11=12"),
            ("1101_2", "1101_4"),
            ("9", r"x\equiv 5 \pmod 9"),
            (r"x\equiv 2\pmod 9", r"x\equiv 2\pmod 7"),
            (r"1,2,\ldots,n", r"1,2,\ldots,2n"),
            (r"1+2+\cdots+n", r"1+2+\cdots+2n"),
            ("4", r"\gg 4"),
            ("4", r"x \not< 4"),
            ("4", r"\{x \mid x > 4\}"),
            ("y=6", r"x=4 \Rightarrow y=6"),
            ("f(x)=0", r"\forall x>0, f(x)=0"),
            ("0x2F", "0xF2"),
            ("110_2+1", "110_3+1"),
            (r"x\in\{1,2\}", "(1,2)"),
            ("7", r"\gtrsim 7"),
            ("7", r"\text{not }7"),
            ("7", r"\min 7"),
            ("7", r"\gcd(7)"),
            (r"\sup A", "A"),
            (r"\det A", "A"),
            ("7", r"\sum 7"),
        ),
    ),
    Kind(
        "An interval and its inequality are equal, in both directions",
        (
            ("(2,7)", "2<x<7"),
            (r"[4,\infty)", r"x \ge 4"),
            ("2<x<7", "(2,7)"),
            ("(2,7]", r"2<x\le7"),
            (r"(-\infty,3)", "x<3"),
            (r"\ge 7", r"[7,\infty)"),
            ("(2,7)", "]2,7["),
            ("(2,7)", r"x>2 \text{ and } x<7"),
            ("[2,7]", r"\{x \mid 2\le x\le7\}"),
            ("[2,7]", "[2;7]"),
            (r"(0,1)\cup(2,3)", r"0<x<1 \text{ or } 2<x<3"),
            (r"(0,1)\cup(2,3)", "(0,1) U (2,3)"),
            (r"\mathbb{R}", r"\text{all real numbers}"),
            ("(2,7)", "7>x>2"),
            (r"x\ge 4", r"4\le x<\infty"),
            (r"\mathbb{R}", r"-\infty<x<\infty"),
            (r"\mathbb{R}", r"\text{All real numbers}"),
            (r"\mathbb{R}\setminus\{0\}", r"\mathbb R-\{0\}"),
            (r"(-\infty,2)\cup(3,\infty)", r"(-\infty,2)\text{ or }(3,\infty)"),
        ),
        (
            ("(2,7)", r"2\le x<7"),
            (r"[4,\infty)", "x>4"),
            ("(2,7)", "2<x<8"),
            ("(2,7]", "(2,7)"),
            ("(2,7)", "[2,7["),
            ("(2,7)", r"x>2 \text{ or } x<7"),
        ),
    ),
    Kind(
        "Colours, fonts, Markdown and typographic signs mean nothing",
        (
            (r"\emptyset", r"\varnothing"),
            ("8", r"\textcolor{red}{8}"),
            ("60", "60°"),
            (r"\sqrt{3}", "√3"),
            ("8", r"{\color{red} 8}"),
            ("8", r"\underline{8}"),
            ("8", r"\mathbf{8}"),
            ("8", "8."),
            ("8", "**8**"),
            ("8", "$8$"),
            ("8", "８"),
            ("60", r"60^\circ"),
            (r"\sqrt{x+1}", "√(x+1)"),
            ("x^2", "x²"),
            (r"\frac12", "½"),
            ("7/2", "3½"),
            (r"3\pi", "3π"),
            ("-3", "\u22123"),
            (r"\infty", "∞"),
            ("6", "2×3"),
            *(("-8", f"{dash}8") for dash in "\u2010\u2011\u2012\u2013\uff0d"),
            *(("8", sign) for sign in ("٨", "८", "𝟖", "\ufeff8", "8\u200b", "８．", "“8”")),
            *(("8", rf"\{name}{{8}}") for name in ("mathsf", "mathtt", "texttt", "Large", "framebox", "ensuremath")),
            ("8", r"\fcolorbox{red}{white}{8}"),
            ("8", r"8\qquad\blacksquare"),
            ("8", r"\begin{aligned}8\end{aligned}"),
            ("8", r"8\tag{1}"),
            ("2x", "2𝑥"),
            (r"\mathbb{Z}", "ℤ"),
            ("3/4", "³⁄₄"),
            ("3/4", r"\nicefrac{3}{4}"),
            (r"\sqrt[3]{5}", "∛5"),
            ("60", "60º"),
            ("18", r"\cancel{17}\,18"),
            ("18", "~~17~~ 18"),
            (r"\frac57", r"\frac{5\cancel{x}}{7\cancel{x}}"),
            *(("8", sign) for sign in (r"8\ \checkmark", "8 ✓", "<b>8</b>", "→ 8", "_8_", "8^{}")),
            *(("8", rf"\{name}{{8}}") for name in ("textcolor[rgb]{1,0,0}", "bold", "textup", "smash", "mathbin")),
            (r"\frac12", r"\left.\frac12\right."),
            (r"\lfloor x\rfloor", "⌊x⌋"),
            (r"\varphi", "φ"),
            (r"\sin x", r"\operatorname{sin}(x)"),
            (r"\tan x", r"\operatorname{tg} x"),
            (r"\binom{5}{2}", r"\tbinom52"),
        ),
        (
            ("8", r"\textcolor{red}{9}"),
            (r"\sqrt3", "√2"),
            ("x^2", "x³"),
            ("1/2", "⅓"),
            ("60", "6°"),
            ("8", "88"),
            ("17", r"\cancel{17}"),
        ),
    ),
    Kind(
        "A mixed number is a sum",
        (
            ("29/4", "7 1/4"),
            ("29/4", r"7\frac{1}{4}"),
            (r"7\frac14", "7.25"),
            ("-29/4", "-7 1/4"),
            ("29/4", r"7\,\tfrac14"),
        ),
        (("7/4", "7 1/4"), ("1/4", "7 1/4"), ("29/4", r"7\cdot\frac14"), ("29/4", "7(1/4)"), ("29/4", r"7(\frac14)")),
    ),
    Kind(
        "References may be plain text",
        (
            ("3*pi", r"3\pi"),
            ("pi/6", r"\frac{\pi}{6}"),
            ("x**2+1", "x^2+1"),
            (r"2-\frac1{\mathrm{e}}", "2-e^{-1}"),
            ("2*sqrt(3)", r"2\sqrt{3}"),
            ("(1+sqrt(5))/2", r"\frac{1+\sqrt5}{2}"),
            ("1/(2*pi)", r"\frac{1}{2\pi}"),
            ("ln(2)", r"\ln 2"),
            ("sin(x)", r"\sin x"),
            ("exp(2)", "e^2"),
            ("infinity", r"\infty"),
            ("12 and 18", "12, 18"),
            ("cbrt(5)", r"\sqrt[3]5"),
            ("abs(x)+floor(y)", r"|x|+\lfloor y\rfloor"),
            ("atan(1)", r"\frac\pi4"),
            ("2^-1", "1/2"),
            ("1+2*I", "1+2i"),
            ("1+2*i", "2 i + 1"),
            ("(1+i)^2", "2i"),
            ("ln(2)", r"\log_e 2"),
            ("Abs(x)", "|x|"),
            ("2*Pi", r"2\pi"),
        ),
        (("3*pi", "3"), ("3*pi", r"\pi"), ("12 and 18", "12"), ("12 and 18", "12, 19")),
    ),
    Kind(
        "A unit after a value is cut; what changes the value, and what may be a variable, is not",
        (
            ("5", r"5\text{ cm}^2"),
            ("5", "5 apples"),
            ("5000000", r"5\text{ million}"),
            ("5", "5 cm"),
            ("5", r"5\,\text{m/s}"),
            ("5", r"5 \text{ m}/\text{s}"),
            ("5", r"5\mathrm{~cm}"),
            ("12", r"\$12"),
            ("12", "12 dollars"),
            (r"\{5,7\}", r"x=5\text{ or }x=7"),
            ("5 m/s", r"5\frac{\text{m}}{\text{s}}"),
            ("5 m/s", r"5\,\mathrm{m\cdot s^{-1}}"),
            (r"5\text{ cm}^2", r"5\text{ square centimetres}"),
            (r"5\text{ cm}^2", r"5\text{ cm²}"),
            ("2 hours and 30 minutes", "2 hours 30 minutes"),
        ),
        (
            ("3", "3t"),
            ("7", r"7\text{ or more}"),
            ("5", r"5\text{ million}"),
            ("3t", "3"),
            ("2", "2ab"),
            ("5", "5x"),
            ("5", "5!"),
            ("7", "7 or 8"),
            ("5 cm^2", "5 cm^3"),
            ("5 km/h", "5 m/s"),
            ("5 hours", "5 minutes"),
            ("5 dollars", "5 cents"),
            ("2 hours 30 minutes", "30 hours 2 minutes"),
        ),
    ),
    Kind(
        "The elements of lists, tuples and sets are answers of their own; a tuple has an order and is no set",
        (
            ("1, 2", "2, 1"),
            (r"(5\%, 3/2)", r"(0.05, 1\frac12)"),
            (r"\{(1,2),(3,4)\}", r"\{(3,4),(1,2)\}"),
            ("(1,2)", r"\langle 1,2\rangle"),
            (r"\frac{x^2}{4}+y^2=1", "x^2+4y^2=4"),
        ),
        (("(1, 2)", "(2, 1)"), ("(1, 2)", r"\{1,2\}"), ("3, 3, 5", "3, 5"), (r"x^2+4y^2=4", "x^2+4y^2=8")),
    ),
)


def table() -> str:
    """Return the decisions as a table of Markdown."""
    lines = ["| rule | equal | different |", "|---|---|---|"]
    for kind in DECISIONS:
        cells = (
            "; ".join(f"`{one}` and `{other}`" for one, other in pairs[:_SHOWN])
            for pairs in (kind.equal, kind.different)
        )
        lines.append(f"| {kind.rule} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_table(page: str) -> str:
    """Return the page with the table of today between its two marks."""
    before, _, rest = page.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def main(page: Path = PAGE) -> int:
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
