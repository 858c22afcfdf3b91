"""The declared metrics of an update, from the numbers that `Policy.update` returns, and of log-prob comparisons."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.algorithms.correction.config import CorrectionSpec
from megarl.algorithms.correction.stats import CORRECTION_NUMBERS
from megarl.algorithms.objective.stats import SAMPLING
from megarl.run.step.off_policy import StepMeasures
from megarl.telemetry.metrics.registry import StepMetrics

# Names in `LossStats` -> names of the metrics.
MISMATCH = {
    "logprob_abs_diff": "logprob_abs_diff_mean",
    "logprob_abs_diff_max": "logprob_abs_diff_max",
    "approx_kl": "k3_kl",
    "ess": "ess",
    "pearson": "logprob_pearson",
    "tokens": "tokens",
}
# The terms of the loss beside `rl`: their counts in `LossStats`, and what is reported of them.
TERMS = {"ref_kl_tokens": ("kl_ref", "ref_kl_loss", "ref_kl_tokens"), "ce_tokens": ("ce", "ce_loss", "ce_tokens")}
# Names in `correction_numbers` -> names of the metrics, below `correction/`: shares of tokens, and of sequences.
CORRECTION = {
    "weight_mean": "weight_mean",
    "weight_max": "weight_max",
    "weight_capped": "capped_share",
    "weight_dropped": "masked_share",
    "weight_ess": "ess",
}
CORRECTION_OF_SEQUENCES = {
    "sequences_capped": "capped_sequences_share",
    "sequences_touched": "masked_sequences_share",
    "sequences_dropped": "dropped_sequences_share",
    "sequence_ess": "sequence_ess",
}
# Raw moments, and what only the comparison of engine and trainer reports.
HIDDEN = {"ratio_squared", "pearson"}


def record_update(metrics: StepMetrics, values: Mapping[str, float], correction: CorrectionSpec | None) -> None:
    """Record `policy/*`, and `correction/*` of a `correction` that acts in the updates.

    Of the terms `ref_kl` and `ce` only if they have tokens.
    """
    terms = {name for names in TERMS.values() for name in names}
    hidden = HIDDEN | CORRECTION_NUMBERS | terms
    shown = {name: value for name, value in values.items() if name not in hidden and not name.startswith(SAMPLING)}
    metrics.record("policy/grad_norm_max", values["grad_norm"])
    metrics.update(shown, prefix="policy/", weight=values["tokens"])
    for count, names in TERMS.items():
        if own := values.get(count, 0.0):
            metrics.update({name: values[name] for name in names}, prefix="policy/", weight=own)
    if correction is not None and "weight_mean" in values:
        record_correction(metrics, values, correction)


def record_correction(metrics: StepMetrics, values: Mapping[str, float], correction: CorrectionSpec) -> None:
    """Record `correction/*` of the numbers of `LossStats.means` and `LossStats.correction_means`."""
    metrics.update(_named(values, CORRECTION), prefix="correction/", weight=values["tokens"])
    metrics.update(_named(values, CORRECTION_OF_SEQUENCES), prefix="correction/", weight=values["sequences"])
    for mask in correction.masks:
        names = {f"rejected_{mask.kind}": f"{mask.kind}/rejected_share", f"largest_{mask.kind}": f"{mask.kind}/largest"}
        metrics.update(_named(values, names), prefix="correction/", weight=values["tokens"])


def _named(values: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {metric: values[name] for name, metric in names.items()}


def record_mismatch(metrics: StepMetrics, values: Mapping[str, float]) -> None:
    """Record the comparison of the engine (old) with the trainer (new), by the names of `LossStats.means`."""
    shown = {metric: values[name] for name, metric in MISMATCH.items()}
    metrics.update(shown, prefix="mismatch/", weight=values["tokens"])


MOST_SHOWN = 32  # replicas of which each has metrics of its own in a step


def record_measures(metrics: StepMetrics, measured: StepMeasures) -> None:
    """Record the comparison of engine and trainer: of all tokens, by version lag and by replica."""
    assert measured.compared is not None  # the step makes an update
    record_mismatch(metrics, measured.compared)
    by_source = measured.by_source
    whole = by_source.whole
    if not whole.tokens:
        return
    metrics.record("mismatch/ratio_tail_share", whole.tail, weight=whole.tokens)
    for lag, gap in by_source.by_lag.items():
        values = {
            "tokens": gap.tokens,
            "logprob_abs_diff": gap.logprob_abs_diff,
            "k3_kl": gap.approx_kl,
            "ess": gap.ess,
        }
        metrics.update(values, prefix=f"mismatch/lag/{lag}/", weight=gap.tokens)
    for replica, by_lag in list(by_source.by_replica.items())[:MOST_SHOWN]:
        tokens = sum(gap.tokens for gap in by_lag.values())
        mean = sum(gap.tokens * gap.logprob_abs_diff for gap in by_lag.values()) / tokens
        values = {"tokens": tokens, "logprob_abs_diff": mean}
        metrics.update(values, prefix=f"mismatch/replica/{replica}/", weight=tokens)
