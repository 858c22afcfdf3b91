r"""Math answers through math-verify, \boxed{} first."""

import json
import os
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rewards.builtin.math import _parse, canonical, check_row, compare, last_boxed, math
from megarl.rewards.types import REASONING_TAGS, RewardInput
from megarl.rewards.worker_pool import RewardPool
from tests.support.checkout import EXCERPTS, ROOT
from tests.support.rewards.math_decisions import DECISIONS, PAGE, with_table
from tests.support.rewards.reward_pool import make_reward_pool, score_all

EXCERPT = EXCERPTS / "problems.jsonl"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{7}, no, \boxed{8}.", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ {a} + {b} }", "{a} + {b}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"\\boxed{3}", "3"),  # escaped twice
        (r"\boxed{7} and then \boxed{8", "7"),  # the last one was cut
        (r"\boxed{7", None),
        (r"} \boxed{5}", "5"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@given(st.text(alphabet="{}\\boxed 1", max_size=60))
def test_last_boxed_never_raises_and_balances(text: str) -> None:
    content = last_boxed(text)
    assert content is None or content in text


@given(st.integers(1, 4000))
def test_unbalanced_boxes_have_no_content(n: int) -> None:
    assert last_boxed(r"\boxed{" * n) is None


def test_last_boxed_is_linear_on_a_degenerate_response() -> None:
    """Two million characters take a fraction of a second; in quadratic time the test would not end for days."""
    assert last_boxed(r"\boxed{" * 300_000) is None


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{27}", "27.0", 1.0),
        (r"\boxed{27.0}", "27", 1.0),
        (r"\boxed{28}", "27", 0.0),
        (r"The answer is 27.", "27", 1.0),
        (r"First 27, so the answer is \boxed{28}.", "27", 0.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{72}", "He has 2*36=72\n#### 72", 1.0),  # GSM8K's own answers work too
        (r"\boxed{5}", r"Thus $x=\boxed{5}$.", 1.0),  # a worked solution as the reference
        (r"\boxed{5}", "$5$", 1.0),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1.0),
        ("no idea", "27", 0.0),
        ("", "27", 0.0),
    ],
)
def test_equivalence(response: str, answer: str, score: float) -> None:
    assert math(RewardInput("", response, answer=answer)).score == score


PAIRS = [
    pytest.param(*pair, float(equal), id=f"{pair[1]} {'=' if equal else '!='} {pair[0]}")
    for kind in DECISIONS
    for pairs, equal in ((kind.equal, True), (kind.different, False))
    for pair in pairs
]


@pytest.mark.parametrize(("answer", "content", "score"), PAIRS)
def test_decisions(answer: str, content: str, score: float) -> None:
    assert math(RewardInput("", rf"Hence \boxed{{{content}}}.", answer=answer)).score == score


def test_the_page_shows_the_decisions() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page), "run `python -m tests.support.rewards.math_decisions`"


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("The answer is 8.", "8", 1.0),
        ("The answer is: **8**", "8", 1.0),
        ("so x = 8", "8", 1.0),
        ("The answers are 12 and 18.", "12 and 18", 1.0),
        ("The answer is 3 1/2", "7/2", 1.0),
        ("The answer is 3 1/2", "1", 0.0),
        ("It is 3 1/2.", "2", 0.0),
        ("so it is \\frac{1}{2}.", "1/2", 1.0),
        ("The answer is 18 because 3*6 = 18, out of 20.", "18", 1.0),
        ("The rate is 7.1e-3.", "0.0071", 1.0),
        ("The interest rate is 4%.", r"4\%", 1.0),
        ("The total is 45\\,000.", "45000", 1.0),
        ("所以答案是8。", "8", 1.0),
        ("答案是8，共有3种方法。", "8", 1.0),
        ("因此一共有8个。", "8", 1.0),
        ("It costs $5.", "5", 1.0),
        ("Between $5 and $7 it is, so $7.", "7", 1.0),
        ("The answer is CAB.", "CAB", 1.0),
        ("The answer is ABC.", "CAB", 0.0),
        ("Hence $f(x) = x+1$.", "x+1", 1.0),
        ("10 + 10 = 20", "20", 1.0),
        ("There are **6** ways.", "6", 1.0),
        ("The answer is one half", "1/2", 0.0),
        ("<answer>7</answer> No: <answer>12</answer> (9 steps)", "12", 1.0),
        ("<answer>7</answer> No: <answer>12</answer>", "7", 0.0),
        ("The answer is 36." + " This agrees with the working above." * 300, "36", 1.0),
        ("The total is 45 000.", "45000", 1.0),
        ("The answer seems to be B.", "B", 1.0),
        ("The correct option is C.", "C", 1.0),
        ("Antwort: C", "C", 1.0),
        ("**C**", "C", 1.0),
        ("The answer is not 17.", "17", 0.0),
        ("The answer is at least 17.", "17", 0.0),
        ("The answer is between 16 and 17.", "17", 0.0),
        ("The answer is March 5.", "5", 0.0),
        ("The answer is March 5, 2023.", "2023-03-05", 1.0),
        ("The answer is 9:30 AM.", "9", 0.0),
        ("The answer is 9:30 AM.", "9:30 am", 1.0),
        ("The ratio is 3:4", "4", 0.0),
        ("The answer is:\n- 17", "17", 1.0),
        ("It is 90.", "He runs 40 km, then 50 km.\n\nTherefore, the answer is: 90.", 1.0),
    ],
)
def test_answers_without_a_box(response: str, answer: str, score: float) -> None:
    assert math(RewardInput("", response, answer=answer)).score == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>\boxed{8}</think> It is \boxed{7}.", 1.0),
        (r"<think>First \boxed{7}. No.</think> The answer is 9.", 0.0),
        (r"a </think> \boxed{8} </think> \boxed{7}", 1.0),
        (r"<think>Perhaps \boxed{7}; let me check the", 0.0),  # cut in its reasoning
        (r"<think>a</think> \boxed{7} <think>Or perhaps", 0.0),  # and so in its second one
        (r"\boxed{7} is what I think.", 1.0),
    ],
)
def test_only_what_follows_the_reasoning_is_judged(response: str, score: float) -> None:
    assert math(RewardInput("", response, answer="7")).score == score


@pytest.mark.parametrize(
    ("prompt_end", "response", "score"),
    [
        ("assistant\n<think>\n", r"Perhaps \boxed{7}; let me check the", 0.0),
        ("assistant\n<think>\n", r"Perhaps \boxed{8}.</think> It is \boxed{7}.", 1.0),
        ("assistant\n<think>\n\n</think>\n\n", r"It is \boxed{7}.", 1.0),  # a template without reasoning
        ("assistant\n", r"It is \boxed{7}.", 1.0),
    ],
)
def test_a_template_may_open_the_reasoning(prompt_end: str, response: str, score: float) -> None:
    sample = RewardInput("", response, answer="7", prompt_end=prompt_end)
    assert math(sample).score == score
    assert math(sample, answer_after="none").score == 1.0


@pytest.mark.parametrize(("start", "end"), REASONING_TAGS)
def test_the_tags_of_published_models_end_a_reasoning(start: str, end: str) -> None:
    def scores(response: str, prompt_end: str = "") -> tuple[float, float]:
        sample = RewardInput("", response, answer="7", prompt_end=prompt_end)
        return math(sample).score, math(sample, answer_after="none").score

    assert scores(rf"{start}Perhaps \boxed{{8}}.{end} It is \boxed{{7}}.") == (1.0, 1.0)
    assert scores(rf"{start}\boxed{{7}}{end} It is 9.") == (0.0, 1.0)
    assert scores(rf"{start}Perhaps \boxed{{7}}; let me check") == (0.0, 1.0)
    assert scores(r"Perhaps \boxed{7}; let me check", prompt_end=f"assistant\n{start}\n") == (0.0, 1.0)
    assert f"`{start}`" in (ROOT / "docs" / "training" / "rewards.md").read_text(encoding="utf-8")


def test_the_whole_response_is_judged_on_request() -> None:
    sample = RewardInput("", r"<think>Perhaps \boxed{7}; let me check", answer="7")
    assert math(sample, answer_after=None).score == math(sample, answer_after="none").score == 1.0
    assert math(RewardInput("Solve it. <think>", r"\boxed{7}", answer="7")).score == 0.0


def ways_to_write(value: Fraction) -> list[str]:
    """Return ways to write a number that all have its value."""
    top, bottom = value.numerator, value.denominator
    sign, size = ("-", -top) if top < 0 else ("", top)
    ways = [rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{2 * top}}}{{{2 * bottom}}}", f"{top}/{bottom}"]
    ways += [
        f"**{top}/{bottom}**",
        rf"\textcolor{{blue}}{{\frac{{{top}}}{{{bottom}}}}}",
        rf"x = \frac{{{top}}}{{{bottom}}}.",
    ]
    if bottom > 1 and size > bottom:
        ways += [f"{sign}{size // bottom} {size % bottom}/{bottom}"]
        ways += [rf"{sign}{size // bottom}\frac{{{size % bottom}}}{{{bottom}}}"]
    scaled = value * 10**6
    if scaled.denominator == 1:
        decimal = f"{Decimal(top) / Decimal(bottom):f}"
        ways += [decimal, f"{decimal}0" if "." in decimal else f"{decimal}.0"]
        ways += [rf"{scaled.numerator} \times 10^{{-6}}", f"{scaled.numerator}e-06"]
        ways += [rf"{100 * top}/{bottom}\%"] if bottom > 1 else []  # whole numbers have units below
    if bottom == 1:
        grouped = f"{size:,}"
        ways += [f"{sign}{grouped}", sign + grouped.replace(",", r"\,"), sign + grouped.replace(",", "~"), f"{top}.0"]
        ways += [rf"{top}\text{{ cm}}", f"{top} apples", f"{top}°", f"${top}$"]
    return ways


NUMBERS = st.one_of(
    st.integers(-(10**7), 10**7).map(Fraction),
    st.fractions(-100, 100, max_denominator=60),
    st.integers(-(10**9), 10**9).map(lambda number: Fraction(number, 10**6)),
)


@settings(deadline=None, max_examples=150)
@given(st.data(), NUMBERS)
def test_another_way_to_write_the_same_number_is_right(data: st.DataObject, value: Fraction) -> None:
    reference, content = (data.draw(st.sampled_from(ways_to_write(value))) for _ in range(2))
    assert math(RewardInput("", rf"\boxed{{{content}}}", answer=reference)).score == 1.0


def test_of_2000_wrong_pairs_none_is_right() -> None:
    drawn = Random(20261129)
    for _ in range(2000):
        kind = drawn.randrange(3)
        value = Fraction(drawn.randint(-(10**6), 10**6), (1, drawn.randint(2, 60), 10**3)[kind])
        other = value + drawn.choice((1, -1, Fraction(1, 7), Fraction(1, 1000), value)) if value else Fraction(1)
        if other in (100 * value, value / 100):
            continue
        reference, content = (drawn.choice(ways_to_write(number)) for number in (value, other))
        assert compare(reference, content)[1] is False, (reference, content)


def test_components() -> None:
    def components(response: str, **kwargs: bool) -> tuple[float, ...]:
        result = math(RewardInput("", response, answer="27"), **kwargs).components
        return result["correct"], result["parsed"], result["boxed"]

    assert components(r"\boxed{27}") == (1.0, 1.0, 1.0)
    assert components("it is 27") == (1.0, 1.0, 0.0)
    assert components("it is 27", require_box=True) == (0.0, 0.0, 0.0)
    assert components("no idea") == (0.0, 0.0, 0.0)
    assert components(r"\boxed{}") == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("57174", "733*78", 0.0),
        ("57174", r"The answer is $733 \times 78$.", 0.0),
        ("57174", "<answer>733*78</answer>", 0.0),
        ("25", "It is 100/4", 0.0),
        ("42", "12 + 30", 0.0),
        ("-1", "So 3-4", 0.0),
        ("57174", "733*78 = 57174", 1.0),
        ("57174", r"\boxed{733\cdot 78}", 1.0),
        ("1024", "The answer is $2^{10}$", 1.0),
        ("0.5", "The answer is 1/2", 1.0),
        ("-7", "answer: -7", 1.0),
        ("1234", "The answer is **1,234**.", 1.0),
    ],
)
def test_a_problem_that_is_repeated_is_no_answer(answer: str, response: str, score: float) -> None:
    """Otherwise a policy learns to write the product that it should compute, or give to a calculator."""
    assert math(RewardInput("", response, answer=answer)).score == score


@pytest.mark.parametrize(
    ("answer", "responses"),
    [
        (
            "1/2",
            [r"\boxed{\frac{1}{2}}", r"\boxed{\frac12}", r"\boxed{0.50}", r"it is $x = \frac{1}{2}$", r"\boxed{.5}"],
        ),
        ("3/2", [r"\boxed{\frac{3}{2}}", r"so $x=\frac{3}{2}$", r"\boxed{1.5}"]),
        ("x**2", [r"\boxed{x^2}", r"\boxed{x ^ {2}}"]),
        ("1234", [r"\boxed{1,234}", r"\boxed{1234.0}", "The answer is 1234."]),
        ("{1, 2}", [r"\boxed{\{1,2\}}", r"\boxed{\{2, 1\}}"]),
        ("9" * 5000, [rf"\boxed{{{'9' * 5000}}}"]),  # more digits than Python writes
        (None, ["no idea", r"\boxed{}", ""]),
    ],
)
def test_equal_answers_vote_alike_and_others_apart(answer: str | None, responses: list[str]) -> None:
    assert {math(RewardInput("", response, answer="7")).answer for response in responses} == {answer}


def test_the_same_answer_of_a_group_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    calls = []
    verify = math_verify.verify
    monkeypatch.setattr(math_verify, "verify", lambda *args, **kwargs: calls.append(args) or verify(*args, **kwargs))
    compare.cache_clear()
    for thought, content in [("a", "1+x"), ("b", "1+x"), ("c", "1-x"), ("d", "1+x"), ("e", "1-x")]:
        result = math(RewardInput(prompt="", response=rf"{thought} \boxed{{{content}}}", answer="x+1"))
        assert result.score == float(content == "1+x")
    assert len(calls) == 2


def test_a_reference_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be read by math-verify"):
        math(RewardInput("", r"\boxed{1}", answer=""))


@pytest.mark.parametrize("answer", ["", " ", "NaN", "nan", "Some words\n####", r"\boxed{}"])
def test_a_row_without_an_answer_is_refused_when_it_is_read(answer: str) -> None:
    with pytest.raises(ValueError, match="is missing"):
        check_row(answer, {})


def test_outside_the_main_thread() -> None:
    """math-verify's own time-out raises there."""
    scores: list[float] = []
    thread = threading.Thread(
        target=lambda: scores.append(math(RewardInput("", r"\boxed{\frac{6}{2}}", answer="3")).score)
    )
    thread.start()
    thread.join(timeout=60)
    assert scores == [1.0]


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    pool = make_reward_pool("math", timeout_s=3.0)
    yield pool
    pool.close()


def test_a_hostile_answer_is_wrong_at_once(pool: RewardPool) -> None:
    """sympy would work on this tower for hours; a policy does find such answers."""
    samples = [RewardInput("", rf"\boxed{{{x}}}", answer="3") for x in ("3", "10^{10^{10^{10}}}", "6/2")]
    outcomes = score_all(pool, samples)
    assert [o.score for o in outcomes] == [1.0, 0.0, 1.0]
    assert [o.answer for o in outcomes] == ["3", None, "3"]
    assert [o.reason for o in outcomes] == [None, None, None]


def test_the_excerpts_own_answers_are_right() -> None:
    for line in EXCERPT.read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert math(RewardInput("", rf"Hence \boxed{{{answer}}}", answer=answer)).score == 1.0


def test_the_full_files_own_answers_are_right(pool: RewardPool) -> None:
    if "MEGARL_DATA" not in os.environ:
        pytest.skip("MEGARL_DATA is not set: the full AIME and AMC files are not here")
    for name, rows in (("aime24", 30), ("amc23", 40)):
        lines = (Path(os.environ["MEGARL_DATA"]) / "math" / f"{name}.jsonl").read_text().splitlines()
        answers = [str(json.loads(line)["answer"]) for line in lines]
        samples = [RewardInput("", rf"Hence \boxed{{{a}}}", answer=a) for a in answers]
        assert [o.score for o in score_all(pool, samples)] == [1.0] * rows


@settings(deadline=None, max_examples=60)
@given(st.integers(-(10**15) + 1, 10**15 - 1), st.sampled_from([0, 0, 1, -1, 10, 1000, 10**14]))
def test_integers_are_compared_without_math_verify_and_as_it_does(number: int, apart: int) -> None:
    from math_verify import verify

    other = number + apart
    found, expected = _parse(str(number)), _parse(str(other))
    theirs = (canonical(found), bool(verify(list(expected), list(found), timeout_seconds=None)))
    assert compare(str(other), str(number)) == theirs == (str(number), apart == 0)


def test_integers_that_are_written_in_another_way_are_left_to_math_verify() -> None:
    assert compare("7", "07") == ("7", True)
    assert compare("1000", "1,000")[1]
    assert compare("7", "7.0")[1]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"\boxed{5\text{ km}}", r"5\text{ cm}", 0.0),  # units that both have
        (r"\boxed{5\text{ km}}", "5 km", 1.0),
        (r"\boxed{5\,\mathrm{cm}^2}", r"5\text{ cm}^2", 1.0),
        (r"\boxed{5\text{ min}}", r"5\text{ mins}", 1.0),
        (r"\boxed{5\text{ kilometers}}", "5 km", 1.0),  # only one of them is known
        (r"\boxed{5}", "5 km", 1.0),
        (r"\boxed{5{\rm km}}", "5", 1.0),
        (r"\boxed{36\pi\text{ cm}^2}", r"36\pi", 1.0),  # units of values that end in a letter
        (r"\boxed{36\pi}", r"36\pi\text{ square cm}", 1.0),
        (r"\boxed{36\pi\text{ cm}}", r"36\pi\text{ m}", 0.0),
        (r"\boxed{\frac{\pi}{3}\text{ radians}}", r"\frac{\pi}{3}", 1.0),
        (r"\boxed{4\pi\cdot h}", r"4\pi", 0.0),
        (r"\boxed{4\pi m}", r"4\pi", 0.0),
        (r"\boxed{2\pi}", r"2\pi hr", 0.0),  # a lateral area
        (r"\boxed{2\pi rh}", r"2\pi hr", 1.0),
        (r"\boxed{4\pi\mathrm{h}}", r"4\pi", 0.0),
        (r"\boxed{m\text{g}}", "m", 0.0),
        (r"\boxed{2^{\rm 3}}", "8", 1.0),
        (r"\boxed{\frac{\pi}{\rm 4}}", r"\frac{\pi}{4}", 1.0),
        (r"\boxed{e^{\rm i\pi}}", "-1", 1.0),
        (r"\boxed{5\%}", r"5\%\text{ per year}", 1.0),
        (r"\boxed{4\pi\text{ or }5\pi}", r"4\pi", 0.0),
        (r"\boxed{3x\text{ cm}}", "3x", 1.0),
        (r"\boxed{3x\text{ if }y}", "3x", 0.0),
        (r"\boxed{10\%}", r"10\text{ cm}", 0.0),
        (r"\boxed{\sin 60^\circ}", r"\frac{\sqrt{3}}{2}", 1.0),  # degrees of a function's argument
        (r"\boxed{5\cos(60°)}", "2.5", 1.0),
        (r"\boxed{\sin^2 45^{\circ}}", "0.5", 1.0),
        (r"\boxed{\sin 60^\circ}", r"\sin 30^\circ", 0.0),
        (r"\boxed{\sin 30}", "0.5", 0.0),
        (r"\boxed{\text{Yes}}", "yes", 1.0),
        (r"\boxed{\text{Yes}}", "no", 0.0),
        (r"\boxed{\text{Five}}", "5", 1.0),  # small numbers in words
        (r"\boxed{12}", "twelve", 1.0),
        (r"\boxed{\text{five}}", "6", 0.0),
        (r"\boxed{\text{fives}}", "5", 0.0),
        (r"\boxed{\textbf{(C) }12}", "C", 1.0),  # a letter with what it stands for
        (r"\boxed{\text{(C) } 12}", "(C)", 1.0),
        (r"\boxed{\textbf{(B) }12}", "C", 0.0),
        (r"\boxed{(A,B)}", "A", 0.0),
        (r"\boxed{1/0}", "5", 0.0),  # no number, and no exception
        (r"\boxed{1/0}", "1/0", 1.0),
        ("The answer is sqrt(2)/2.", "sqrt(2)/2", 1.0),
        ("The answer is 2 sqrt(3).", r"2\sqrt{3}", 1.0),
    ],
)
def test_units_words_letters_and_what_is_no_number(response: str, answer: str, score: float) -> None:
    assert math(RewardInput("", response, answer=answer)).score == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (r"So it is \boxed{5", "5", 0.0),  # of \boxed{52}, perhaps
        ("The answer is **8**.", "8", 1.0),
        ("The answer is **8", "8", 1.0),
        ("The answer is **8** ways.", "9", 0.0),
        (r"\boxed{\,8\,}", "8", 1.0),
        (r"\boxed{\quad 8~}", "8", 1.0),
        (r"\boxed{8\,\text{cm}\,}", "8", 1.0),
        (r"\boxed{1 \over 2}", "1/2", 1.0),  # TeX's infix commands
        (r"\boxed{-{\sqrt{3} \over 2}}", r"-\frac{\sqrt3}{2}", 1.0),
        (r"\boxed{{5 \choose 2}}", "10", 1.0),
        (r"\boxed{5 \choose 2}", r"\binom{5}{3}", 1.0),
        (r"\boxed{1 \over 2}", "2", 0.0),
        (r"\boxed{1,2,3}", "1,2,3,...", 0.0),
        (r"\boxed{1,2,3,\ldots}", "1, 2, 3, ...", 1.0),
        (r"\boxed{1+2+3}", "1+2+...", 0.0),
        (r"\boxed{\lambda + \mu}", "lambda + mu", 1.0),
        (r"\boxed{2\omega}", "2*omega", 1.0),
        (r"\boxed{\infty}", "oo", 1.0),
        (r"\boxed{\infty}", "-oo", 0.0),
        (r"\boxed{x<2 \text{ or } x>3}", r"(-\infty,2)\cup(3,\infty)", 1.0),
        (r"\boxed{(-\infty,2]\cup[3,\infty)}", r"x \le 2 \text{ or } x \ge 3", 1.0),
        (r"\boxed{(-\infty,2)\cup[3,\infty)}", r"x \le 2 \text{ or } x \ge 3", 0.0),
        (r"\boxed{x>3}", r"x<2 \text{ or } x>3", 0.0),
    ],
)
def test_answers_that_were_cut_and_forms_that_others_report(response: str, answer: str, score: float) -> None:
    assert math(RewardInput("", response, answer=answer)).score == score
