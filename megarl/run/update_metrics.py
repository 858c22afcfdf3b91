"""The declared metrics of an update, from the numbers that `Policy.update` returns, and of log-prob comparisons."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.algorithms.stats import SAMPLING
from megarl.config.schema import Config
from megarl.telemetry.metrics import StepMetrics

# Names in `LossStats` -> names of the metrics.
MISMATCH = {
    "logprob_abs_diff": "logprob_abs_diff_mean",
    "logprob_abs_diff_max": "logprob_abs_diff_max",
    "approx_kl": "k3_kl",
    "ess": "ess",
    "pearson": "logprob_pearson",
    "tokens": "tokens",
}
CORRECTION = {"weight_mean": "weight_mean", "weight_capped": "capped_share", "weight_ess": "ess"}
# Raw moments, and what only the comparison of engine and trainer reports.
HIDDEN = {"ratio_squared", "pearson"}


def record_update(metrics: StepMetrics, values: Mapping[str, float], config: Config) -> None:
    """Record `policy/*`, and with a correction `correction/*`. `kl_ref` is a metric only if there is a reference."""
    hidden = HIDDEN | CORRECTION.keys() | (set() if config.needs_reference else {"kl_ref"})
    shown = {name: value for name, value in values.items() if name not in hidden and not name.startswith(SAMPLING)}
    tokens = values["tokens"]
    metrics.record("policy/grad_norm_max", values["grad_norm"])
    metrics.update(shown, prefix="policy/", weight=tokens)
    corrected = {metric: values[name] for name, metric in CORRECTION.items() if name in values}
    metrics.update(corrected, prefix="correction/", weight=tokens)


def engine_against_trainer(values: Mapping[str, float]) -> Mapping[str, float]:
    """Return what the first update of a step tells about the engine's log-probs (old) and the trainer's (new).

    Without a correction its ratio compares them. With one, its ratio has the trainer's log-probs on both sides.
    """
    compared = {name.removeprefix(SAMPLING): value for name, value in values.items() if name.startswith(SAMPLING)}
    return compared or values


def record_mismatch(metrics: StepMetrics, values: Mapping[str, float]) -> None:
    """Record the comparison of the engine (old) with the trainer (new), by the names of `LossStats.means`."""
    shown = {metric: values[name] for name, metric in MISMATCH.items()}
    metrics.update(shown, prefix="mismatch/", weight=values["tokens"])
