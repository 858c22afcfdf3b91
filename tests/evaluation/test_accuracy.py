"""Evaluation metrics: exact values, and hypothesis against brute force over all subsets."""

import io
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megarl.evaluation.accuracy import (
    EvalReport,
    SampleFailure,
    ScoredResponse,
    default_ks,
    estimate_mean,
    evaluate_responses,
    majority_vote,
    pass_at_k,
    wilson_interval,
)
from megarl.evaluation.table import WIDTH, report_table

responses = st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7)


def subsets(pairs, k):
    return list(itertools.combinations(pairs, k))


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    draws = subsets(correct, k)
    expected = sum(any(draw) for draw in draws) / len(draws)
    assert pass_at_k(len(correct), sum(correct), k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("arguments", [(4, 5, 1), (4, 1, 0), (4, 1, 5), (4, -1, 1)])
def test_pass_at_k_refuses_the_impossible(arguments):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*arguments)


def vote(draw, rate):
    """Majority vote by definition, ties by expectation; `rate`: each answer's share of correct responses."""
    counts = Counter(answer for answer, _ in draw if answer is not None)
    if not counts:
        return 0.0
    best = [answer for answer, number in counts.items() if number == max(counts.values())]
    return sum(rate[answer] for answer in best) / len(best)


@settings(max_examples=200, deadline=None)
@given(responses)
def test_majority_is_the_vote_over_all_responses(pairs):
    rate = {}
    for answer in {answer for answer, _ in pairs} - {None}:
        judged = [ok for each, ok in pairs if each == answer]
        rate[answer] = sum(judged) / len(judged)
    answers, correct = [answer for answer, _ in pairs], [ok for _, ok in pairs]
    assert majority_vote(answers, correct) == pytest.approx(vote(pairs, rate), abs=1e-12)


def test_majority_refuses_bad_input():
    with pytest.raises(ValueError, match="2 answers but 1 judgements"):
        majority_vote(["a", "b"], [True])


def test_wilson_reference_values():
    # Newcombe 1998, table I, method 3: 81/263, 15/148, 0/20, 1/29.
    for successes, n, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611),
                                    (1, 29, 0.0061, 0.1718)]:  # fmt: skip
        assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson_interval(20, 20)[1] == 1.0


@settings(deadline=None)
@given(st.integers(1, 400), st.floats(0, 1), st.floats(0.5, 0.999))
def test_wilson_contains_the_proportion(n, share, confidence):
    successes = round(share * n)
    low, high = wilson_interval(successes, n, confidence)
    assert 0 <= low <= successes / n <= high <= 1


def test_estimate_says_which_interval():
    binary = estimate_mean([1.0, 0.0, 0.0, 1.0])
    assert binary.method == "wilson"
    assert (binary.value, binary.low, binary.high) == (0.5, *wilson_interval(2, 4))
    mixed = estimate_mean([0.25, 0.5, 0.75])
    assert mixed.method == "normal"
    assert mixed.high - mixed.value == pytest.approx(1.959964 * 0.25 / math.sqrt(3), rel=1e-6)
    certain = estimate_mean([0.5, 0.5])  # no variance is no certainty
    assert certain.method == "wilson" and certain.high - certain.low > 0.5
    assert estimate_mean([0.9, 0.95, 0.2], bounds=(0.0, 1.0)).high == 1.0
    assert estimate_mean([-1.0]).low == -math.inf


def test_default_ks():
    assert default_ks(1) == [1]
    assert default_ks(4) == [1, 2, 4]
    assert default_ks(6) == [1, 2, 4, 6]


def make_problems():
    return [
        [ScoredResponse(1.0, "4", 10), ScoredResponse(0.0, "5", 20)],
        [ScoredResponse(0.0, None, 30, True), ScoredResponse(0.0, "5", 20)],
        [ScoredResponse(1.0, "9", 5), ScoredResponse(1.0, "9", 5)],
    ]


def test_report_exact():
    report = evaluate_responses("held-out", make_problems())
    assert report.mean.value == pytest.approx((0.5 + 0 + 1) / 3)
    assert {k: estimate.value for k, estimate in report.pass_at.items()} == pytest.approx({1: 0.5, 2: 2 / 3})
    assert report.pass_at[2].method == "wilson" and report.pass_at[1].method == "normal"
    assert report.majority.value == pytest.approx((0.5 + 0 + 1) / 3)
    assert (report.mean_tokens, report.max_tokens) == (15.0, 30)
    assert (report.truncated_share, report.parsed_share) == pytest.approx((1 / 6, 5 / 6))


def test_failures_are_counted_by_kind_and_count_by_their_score():
    failed = SampleFailure("reward", "timeout: no reward after 3 s")
    report = evaluate_responses(
        "held-out",
        [
            [ScoredResponse(1.0, "1"), ScoredResponse(0.0, failure=failed)],
            [ScoredResponse(0.0, failure=SampleFailure("generation", "aborted")), ScoredResponse(0.0, failure=failed)],
        ],
    )
    assert (report.responses, report.failures) == (4, 3)
    assert (report.failed_generations, report.reward_errors, report.first_failure) == (1, 2, failed.message)
    assert report.mean.value == 0.25
    assert {"failed_generations": 1, "reward_errors": 2, "first_failure": failed.message}.items() <= (
        report.to_dict().items()
    )
    assert "held-out: 1 generations and 2 rewards of 4 responses failed" in rendered([report])
    assert evaluate_responses("held-out", make_problems()).first_failure is None


def rendered(reports: list[EvalReport]) -> str:
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(report_table(reports))
    return console.export_text()


def test_the_tables_fit_100_columns_whatever_they_show():
    """A cell that did not fit would end with an ellipsis; the name of a set may go on in the next line."""
    responses = [[ScoredResponse(1.0, "1", tokens=123_456)] * 32] * 12_345
    text = rendered([evaluate_responses("aime_2024_i sampled", responses)])
    lines = [line.split() for line in text.splitlines() if "aime" in line]
    assert WIDTH == 100 and "…" not in text and max(map(len, text.splitlines())) <= WIDTH
    assert lines[0] == ["aime_2024_i", "12345", "32", *["100.0%", "[100.0,", "100.0]"] * 2, "123456",
                        "123456", "0%", "100%"]  # fmt: skip
    assert [line.split()[-4] for line in text.splitlines() if line.rstrip().endswith("100.0]")] == [
        "2",
        "4",
        "8",
        "16",
        "32",
    ]


def test_means_of_graded_rewards_are_no_percentages():
    graded = evaluate_responses("shares", [[ScoredResponse(0.25)], [ScoredResponse(-0.5)]])
    assert graded.graded and "-0.125 [" in rendered([graded])
    sometimes = evaluate_responses("right", [[ScoredResponse(1.0), ScoredResponse(0.0)]])
    assert not sometimes.graded and "50.0% [" in rendered([sometimes])


def test_report_dict_and_table():
    report = evaluate_responses("held-out", make_problems())
    as_json = json.loads(json.dumps(report.to_dict()))
    assert as_json["pass@2"]["value"] == report.pass_at[2].value
    assert {"mean@2", "maj@2", "truncated_share"} <= set(as_json)
    text = rendered([report, evaluate_responses("one", [problem[:1] for problem in make_problems()])])
    assert "failed" not in text
    assert "held-out" in text and "pass@k" in text and "50.0% [" in text and "66.7% [" in text


def test_report_scores_outside_the_unit_interval():
    report = evaluate_responses("signed", [[ScoredResponse(-1.0, "a")], [ScoredResponse(1.0, "b")]])
    assert report.mean.value == 0.0 and report.mean.method == "normal" and report.mean.low < -1.0
    assert report.pass_at[1].value == 0.5
    alone = evaluate_responses("signed", [[ScoredResponse(-1.0)]]).to_dict()
    assert json.loads(json.dumps(alone, allow_nan=False))["mean@1"]["low"] is None


@pytest.mark.parametrize(
    ("problems", "message"),
    [([], "empty"), ([[]], "same number"), ([[ScoredResponse(1)], [ScoredResponse(1)] * 2], r"\[1, 2\]")],
)
def test_report_refuses_unusable_sets(problems, message):
    with pytest.raises(ValueError, match=message):
        evaluate_responses("x", problems)
