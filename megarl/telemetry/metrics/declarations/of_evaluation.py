"""Metrics of held-out evaluations."""

from __future__ import annotations

from megarl.telemetry.metrics.registry import Metric

EVAL = [
    Metric("eval/step", "steps", "last", "Steps done when the evaluation began."),
    Metric("eval/version", "version", "last", "Version of the weights with which the evaluation began."),
    Metric("eval/oldest_version", "version", "last", "Oldest version of a token of its responses."),
    Metric(
        "eval/newest_version",
        "version",
        "last",
        "Newest version of a token; above the oldest if the trainer went on (`evaluation.concurrent`).",
    ),
    Metric("eval/{set}/greedy", "share", "last", "Accuracy at temperature 0."),
    Metric("eval/{set}/sampled", "share", "last", "mean@k at `evaluation.sampling`."),
    Metric("eval/{set}/greedy_low", "share", "last", "Lower end of the 95% interval."),
    Metric("eval/{set}/greedy_high", "share", "last", "Upper end of the 95% interval."),
    Metric("eval/{set}/sampled_low", "share", "last", "Lower end of the 95% interval."),
    Metric("eval/{set}/sampled_high", "share", "last", "Upper end of the 95% interval."),
    Metric("eval/{set}/pass@{k}", "share", "last", "Unbiased pass@k of the sampled responses."),
    Metric("eval/{set}/maj@{k}", "share", "last", "Majority vote of the k sampled responses."),
    Metric("eval/{set}/n", "problems", "last", "Problems in the set."),
    Metric("eval/{set}/parsed", "share", "last", "Share of greedy responses with an answer that parses."),
    Metric("eval/{set}/length_mean", "tokens", "last", "Mean length of the greedy responses."),
    Metric("eval/{set}/truncated_share", "share", "last", "Share of greedy responses cut at the limit."),
    Metric(
        "eval/{set}/failed_generations",
        "responses",
        "last",
        "Greedy and sampled responses that the engine aborted or returned without finite log-probs.",
    ),
    Metric(
        "eval/{set}/reward_errors",
        "responses",
        "last",
        "Greedy and sampled responses whose reward function failed; scored `reward.on_error`, 0 with `drop`.",
    ),
]
