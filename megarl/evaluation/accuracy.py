"""Evaluation metrics as pure functions: mean@k, unbiased pass@k, maj@k, confidence intervals, lengths.

A *problem* is the list of responses to one prompt. Every metric is computed per problem and then averaged over
problems. Confidence intervals are over problems, because responses to one problem are not independent.

There are two kinds of interval. `wilson`, the score interval of a proportion, is used if every problem's value is 0 or
1. It is also used if all problems have the same value in [0, 1]: their variance of zero would claim certainty, and a
proportion has the largest variance of all values in [0, 1] with the same mean. Otherwise `normal` is used:
mean ± z·s/√n over problems, clipped to the metric's range.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

DEFAULT_CONFIDENCE = 0.95
CORRECT_AT = 1.0


@dataclass(frozen=True)
class SampleFailure:
    """Why a response says nothing about the model.

    `generation`: the engine did not finish it. `reward`: the reward function returned no reward.
    """

    kind: Literal["generation", "reward"]
    message: str


@dataclass(frozen=True)
class ScoredResponse:
    """One response with its reward.

    `answer`: the final answer in the text, or None; `tokens`: the response length, including EOS; `truncated`: it was
    cut at the token limit. The score of a response with a `failure` counts like any other.
    """

    score: float
    answer: str | None = None
    tokens: int = 0
    truncated: bool = False
    failure: SampleFailure | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its confidence interval [low, high]."""

    value: float
    low: float
    high: float
    method: Literal["wilson", "normal"]


@dataclass(frozen=True)
class EvalReport:
    """The metrics of one evaluation set in one sampling mode; shares are in [0, 1], lengths in tokens.

    Every failed response counts either in `failed_generations` or in `reward_errors`; `first_failure`: the message of
    the first one. `graded`: some score is neither 0 nor 1, so the mean is not a share of correct responses.
    """

    name: str
    problems: int
    samples_per_problem: int
    confidence: float
    mean: Estimate
    pass_at: dict[int, Estimate]
    majority: Estimate
    mean_tokens: float
    max_tokens: int
    truncated_share: float
    parsed_share: float
    failed_generations: int
    reward_errors: int
    first_failure: str | None
    graded: bool = False

    @property
    def responses(self) -> int:
        """The number of responses."""
        return self.problems * self.samples_per_problem

    @property
    def failures(self) -> int:
        """The number of failed responses."""
        return self.failed_generations + self.reward_errors

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON content; the main metrics have their k in the key: `mean@4`, `pass@2`, `maj@4`.

        An infinite end of an interval (one problem, unbounded scores) is None.
        """
        k = self.samples_per_problem
        return {
            "name": self.name,
            "problems": self.problems,
            "samples_per_problem": k,
            "confidence": self.confidence,
            f"mean@{k}": _as_json(self.mean),
            **{f"pass@{each}": _as_json(estimate) for each, estimate in self.pass_at.items()},
            f"maj@{k}": _as_json(self.majority),
            "mean_tokens": self.mean_tokens,
            "max_tokens": self.max_tokens,
            "truncated_share": self.truncated_share,
            "parsed_share": self.parsed_share,
            "failed_generations": self.failed_generations,
            "reward_errors": self.reward_errors,
            "first_failure": self.first_failure,
        }


def are_verdicts(scores: Sequence[float]) -> bool:
    """Return whether all scores are 1 (right) or 0 (wrong), so that their mean is a share of correct responses.

    The mean of others, such as partial credit, must not be called an accuracy.
    """
    return all(score in (0.0, 1.0) for score in scores)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Estimate without bias the probability that at least one of k draws is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1. Raises ValueError unless
    0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"pass@k: {correct} correct of {samples} samples is impossible")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs between 1 and {samples} samples per draw (there are {samples})")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_vote(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return the expected correctness of the majority vote over the responses to one problem.

    Equal strings are one answer, so answers should be normalized; the correctness of an answer is the share of its
    correct responses. Responses without an answer abstain; the vote is wrong if all abstain. The result is the exact
    expectation over a fair draw among tied answers, so it depends neither on the order of responses nor on a seed.
    Raises ValueError if the lengths differ.
    """
    if len(correct) != len(answers):
        raise ValueError(f"maj@k: {len(answers)} answers but {len(correct)} judgements")
    votes = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, ok in zip(answers, correct, strict=True) if ok and answer is not None)
    winners = [answer for answer, number in votes.items() if number == max(votes.values())]
    return sum((1 / len(winners) * right[answer] / votes[answer] for answer in winners), start=0.0)


def wilson_interval(successes: float, n: int, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval (low, high) of a proportion (Wilson 1927).

    Raises ValueError unless n >= 1 and 0 <= successes <= n.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"Wilson interval: {successes} successes of {n} is impossible")
    z = _z(confidence)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return low, high


def estimate_mean(
    values: Sequence[float],
    confidence: float = DEFAULT_CONFIDENCE,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return the mean of one value per problem, with its interval (see the module's docstring).

    `bounds`: the range of the metric. Raises ValueError if there are no values.
    """
    if not values:
        raise ValueError("the evaluation set is empty: add problems to it")
    n, mean = len(values), fmean(values)
    in_unit = all(0.0 <= value <= 1.0 for value in values)
    if in_unit and (all(value in {0.0, 1.0} for value in values) or min(values) == max(values)):
        low, high = wilson_interval(min(mean * n, n), n, confidence)
        return Estimate(mean, low, high, "wilson")
    half = _z(confidence) * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    low, high = max(bounds[0], mean - half), min(bounds[1], mean + half)
    return Estimate(mean, low, high, "normal")


def default_ks(samples: int) -> list[int]:
    """Return the powers of two up to `samples`, and `samples` itself, ascending."""
    ks = [1 << power for power in range(samples.bit_length()) if 1 << power <= samples]
    return ks if ks[-1] == samples else [*ks, samples]


def evaluate_responses(
    name: str,
    problems: Sequence[Sequence[ScoredResponse]],
    *,
    ks: Sequence[int] | None = None,
    correct_at: float = CORRECT_AT,
    confidence: float = DEFAULT_CONFIDENCE,
) -> EvalReport:
    """Compute the report of one evaluation set. A response is correct if its score is >= `correct_at`.

    mean@k is the mean score; pass@k is computed for `ks` (default: powers of two up to the samples per problem) and
    maj@k over all responses. Raises ValueError for an empty set, a problem without responses, or problems with
    different numbers of responses.
    """
    if not problems:
        raise ValueError(f"evaluation set {name!r} is empty: add problems to it")
    sizes = {len(problem) for problem in problems}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"evaluation set {name!r}: every problem needs the same number of responses (>= 1), got {sorted(sizes)}"
        )
    samples = sizes.pop()
    ks = default_ks(samples) if ks is None else sorted(set(ks))
    flat = [response for problem in problems for response in problem]
    unit = all(0.0 <= response.score <= 1.0 for response in flat)
    correct = [[response.score >= correct_at for response in problem] for problem in problems]
    votes = [
        majority_vote([response.answer for response in problem], judged)
        for problem, judged in zip(problems, correct, strict=True)
    ]
    graded = not are_verdicts([response.score for response in flat])
    failures = [response.failure for response in flat if response.failure is not None]
    return EvalReport(
        name=name,
        problems=len(problems),
        samples_per_problem=samples,
        confidence=confidence,
        mean=estimate_mean(
            [fmean(response.score for response in problem) for problem in problems],
            confidence,
            (0.0, 1.0) if unit else (-math.inf, math.inf),
        ),
        pass_at={
            k: estimate_mean([pass_at_k(samples, sum(judged), k) for judged in correct], confidence, (0.0, 1.0))
            for k in ks
        },
        majority=estimate_mean(votes, confidence, (0.0, 1.0)),
        mean_tokens=fmean(response.tokens for response in flat),
        max_tokens=max(response.tokens for response in flat),
        truncated_share=fmean(response.truncated for response in flat),
        parsed_share=fmean(response.answer is not None for response in flat),
        failed_generations=sum(failure.kind == "generation" for failure in failures),
        reward_errors=sum(failure.kind == "reward" for failure in failures),
        first_failure=failures[0].message if failures else None,
        graded=graded,
    )


def _as_json(estimate: Estimate) -> dict[str, Any]:
    """Return the estimate as JSON content, with None for an infinite end."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(estimate).items()
    }


def _z(confidence: float) -> float:
    """Return the standard normal quantile of a two-sided interval."""
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, e.g. 0.95, not {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
