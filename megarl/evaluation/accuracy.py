"""Evaluation metrics as pure functions: mean@k, unbiased pass@k, maj@k, confidence intervals, lengths.

A *problem* is the list of the responses sampled for one prompt. Every figure is first computed per problem
and then averaged over problems, so that intervals are over problems (responses to one problem are not
independent).

Intervals: `wilson` (score interval of a proportion) if every problem's value is 0 or 1, or if all problems
have one and the same value in [0, 1] (a zero variance would claim certainty; a proportion has the largest
variance that values in [0, 1] with that mean can have); otherwise `normal`: mean ± z·s/√n over problems, cut
to the metric's range.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

DEFAULT_CONFIDENCE = 0.95
CORRECT_AT = 1.0


@dataclass(frozen=True)
class SampleFailure:
    """Why a response says nothing about the model: the engine did not end it, or its judge did not judge it."""

    kind: Literal["generation", "reward"]
    message: str


@dataclass(frozen=True)
class ScoredResponse:
    """One judged response.

    `answer` is the final answer extracted from the text, None if there is none; `tokens` the response length
    in tokens, EOS included; `truncated` says that it was cut at the token limit. One with a `failure` counts by its
    score all the same.
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
    """One evaluation set under one way of sampling; shares are in [0, 1], lengths in tokens.

    Every failed response is either a failed generation or a reward error; `first_failure` says why the first one is.
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

    @property
    def responses(self) -> int:
        return self.problems * self.samples_per_problem

    @property
    def failures(self) -> int:
        return self.failed_generations + self.reward_errors

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; keys of the headline figures carry their k: `mean@4`, `pass@2`, `maj@4`.

        An unbounded end of an interval (one problem, unbounded scores) is null.
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


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased probability that at least one of k draws is correct: 1 - C(n-c, k) / C(n, k).

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1. ValueError unless
    0 <= correct <= samples and 1 <= k <= samples.
    """
    if not 0 <= correct <= samples:
        raise ValueError(f"pass@k: {correct} correct of {samples} samples is impossible")
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs between 1 and {samples} samples per draw (there are {samples})")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int | None = None) -> float:
    """Expected correctness of the majority vote over k of the responses, drawn without replacement.

    Responses without an answer abstain; if all abstain the vote is wrong. Ties are decided by a fair draw
    among the tied answers, of which this is the exact expectation: nothing depends on order or on a seed.
    Equal strings are one answer (pass normalised ones); its correctness is the share of its responses judged
    correct. k None = all responses. ValueError if the lengths differ or k is out of range.
    """
    n = len(answers)
    if len(correct) != n:
        raise ValueError(f"maj@k: {n} answers but {len(correct)} judgements")
    k = n if k is None else k
    if not 1 <= k <= n:
        raise ValueError(f"maj@{k} needs between 1 and {n} responses per vote (there are {n})")
    counts = Counter(answer for answer in answers if answer is not None)
    right = Counter(answer for answer, ok in zip(answers, correct, strict=True) if ok and answer is not None)
    abstaining = n - sum(counts.values())
    sizes = Counter(counts.values())
    wins = {size: _win_weight(size, sizes, abstaining, k) for size in sizes}
    total = sum(wins[counts[answer]] * right[answer] / counts[answer] for answer in counts)
    return total / math.comb(n, k)


def _win_weight(size: int, sizes: Mapping[int, int], abstaining: int, k: int) -> float:
    """Sum over the k-subsets of (the chance that one given answer of `size` responses wins the vote).

    `sizes` maps a count of responses to the number of distinct answers that have it, this one included.
    """
    rivals = [other for other, number in sizes.items() for _ in range(number)]
    rivals.remove(size)
    total = 0.0
    for votes in range(1, min(size, k) + 1):
        # ways[(used, ties)]: choices of `used` responses of the rivals seen so far, none above `votes`,
        # `ties` equal.
        ways = {(0, 0): 1}
        for rival in rivals:
            grown: dict[tuple[int, int], int] = {}
            for (used, ties), number in ways.items():
                for extra in range(min(rival, votes, k - votes - used) + 1):
                    state = (used + extra, ties + (extra == votes))
                    grown[state] = grown.get(state, 0) + number * math.comb(rival, extra)
            ways = grown
        own = math.comb(size, votes)
        for (used, ties), number in ways.items():
            total += own * number * math.comb(abstaining, k - votes - used) / (1 + ties)
    return total


def wilson_interval(successes: float, n: int, confidence: float = DEFAULT_CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a proportion (Wilson 1927); `successes` in [0, n]. ValueError for n < 1."""
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
    """Mean of one value per problem with its interval (which: see the module's head). ValueError if empty."""
    if not values:
        raise ValueError("no problem to evaluate: the evaluation set is empty")
    n, mean = len(values), fmean(values)
    in_unit = all(0.0 <= value <= 1.0 for value in values)
    if in_unit and (all(value in {0.0, 1.0} for value in values) or min(values) == max(values)):
        low, high = wilson_interval(min(mean * n, n), n, confidence)
        return Estimate(mean, low, high, "wilson")
    half = _z(confidence) * stdev(values) / math.sqrt(n) if n > 1 else math.inf
    low, high = max(bounds[0], mean - half), min(bounds[1], mean + half)
    return Estimate(mean, low, high, "normal")


def default_ks(samples: int) -> list[int]:
    """Powers of two up to `samples`, and `samples` itself."""
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
    """The report of one evaluation set. A response is correct when its score is >= `correct_at`.

    mean@k is the mean score, pass@k is given for `ks` (default: powers of two up to the samples per problem),
    maj@k for all responses. ValueError for an empty set, a problem without responses, or unequal numbers of
    responses.
    """
    if not problems:
        raise ValueError(f"evaluation set {name!r} is empty: nothing to report")
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
        majority_at_k([response.answer for response in problem], judged)
        for problem, judged in zip(problems, correct, strict=True)
    ]
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
    )


def _as_json(estimate: Estimate) -> dict[str, Any]:
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in asdict(estimate).items()
    }


def _z(confidence: float) -> float:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must be between 0 and 1, e.g. 0.95, not {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
