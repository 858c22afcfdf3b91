"""The statistics of a correction: sums and maxima that reduce exactly over micro-batches and ranks, and the report.

Shapes: R response tokens, S sequences.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from megarl.algorithms.correction.apply import TokenWeights
from megarl.algorithms.correction.masks import MASKS

_SEQUENCE_SHARES = ("sequences_capped", "sequences_touched", "sequences_dropped")
# The statistics of a correction, as keys of `LossStats`: sums over tokens or sequences, and maxima, all >= 0.
CORRECTION_SUMS = (
    *("weight", "weight_squared", "capped", "dropped"),
    *("sequence_weight", "sequence_weight_squared", *_SEQUENCE_SHARES),
    *(f"rejected_{kind}" for kind in MASKS),
)
CORRECTION_MAXIMA = ("weight", *(f"largest_{kind}" for kind in MASKS))
_REJECTED = [f"rejected_{kind}" for kind in MASKS]
_TOKEN_SHARES = {"weight_capped": "capped", "weight_dropped": "dropped"} | dict(zip(_REJECTED, _REJECTED, strict=True))


def correction_statistics(weights: TokenWeights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the statistics of a correction under CORRECTION_SUMS and CORRECTION_MAXIMA: fp64, 0-dim.

    A sequence's weight is the mean over its trained tokens; `touched`: at least one is dropped, `dropped`: all are.
    Sequences without a trained token are not counted.
    """
    weights_R, tokens = weights.weights_R.double(), weights.tokens
    weight_S, dropped_S = tokens.means(weights_R), tokens.counts(weights.dropped_R)
    zero = weights_R.new_zeros(())
    sums = dict.fromkeys(CORRECTION_SUMS, zero) | {
        "weight": weights_R.sum(),
        "weight_squared": weights_R.square().sum(),
        "capped": _count(weights.capped_R),
        "dropped": _count(weights.dropped_R),
        "sequence_weight": weight_S.sum(),
        "sequence_weight_squared": weight_S.square().sum(),
        "sequences_capped": _count(tokens.counts(weights.capped_R) > 0),
        "sequences_touched": _count(dropped_S > 0),
        "sequences_dropped": _count((dropped_S > 0) & (dropped_S == tokens.lengths)),
    }
    maxima = dict.fromkeys(CORRECTION_MAXIMA, zero)
    if weights_R.numel():
        maxima["weight"] = weights_R.max()
    for rejection in weights.rejections:
        sums[f"rejected_{rejection.kind}"] = _count(rejection.rejected_R)
        maxima[f"largest_{rejection.kind}"] = rejection.largest.double()
    return sums, maxima


def _count(marked: Tensor) -> Tensor:
    return marked.sum(dtype=torch.float64)


def correction_numbers(
    sums: Mapping[str, float], maxima: Mapping[str, float], tokens: float, sequences: float
) -> dict[str, float]:
    """Return the numbers to report, from reduced statistics. `tokens`, `sequences`: how many are trained.

    `weight_mean`, `weight_max`; `weight_capped`, `weight_dropped` and `rejected_*` as shares of tokens; `sequences_*`
    as shares of sequences; `largest_*` in nats. `weight_ess` is the relative effective sample size of the coefficients,
    (sum w)^2 / (n sum w^2), including the 0 of masked tokens; `sequence_ess` is that of the sequences' means. Both are
    1 without tokens, and 0 if every coefficient is 0.
    """
    return {
        "weight_mean": sums["weight"] / max(tokens, 1.0),
        "weight_ess": _ess(sums["weight"], sums["weight_squared"], tokens),
        "sequence_ess": _ess(sums["sequence_weight"], sums["sequence_weight_squared"], sequences),
        "weight_max": maxima["weight"],
        **{name: sums[key] / max(tokens, 1.0) for name, key in _TOKEN_SHARES.items()},
        **{key: sums[key] / max(sequences, 1.0) for key in _SEQUENCE_SHARES},
        **{key: maxima[key] for key in CORRECTION_MAXIMA if key != "weight"},
    }


def _ess(total: float, squared: float, count: float) -> float:
    if not count:
        return 1.0
    return total**2 / (count * squared) if squared else 0.0


# The names of `correction_numbers`.
CORRECTION_NUMBERS = frozenset(
    correction_numbers(dict.fromkeys(CORRECTION_SUMS, 0.0), dict.fromkeys(CORRECTION_MAXIMA, 0.0), 0.0, 0.0)
)
