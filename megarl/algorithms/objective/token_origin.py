"""Engine against trainer by each token's source: sums and maxima per bucket, which reduce exactly over any split.

A bucket stands for one replica and one version lag (`megarl/run/step/off_policy.py`). Shapes: R response tokens, B
buckets, K sum keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.objective.stats import MAX_LOGGED_LOG_RATIO

KEYS = ("tokens", "logprob_abs_diff", "approx_kl", "ratio", "ratio_squared", "tail")
NO_SOURCE = -1  # the bucket of tokens that no engine sampled
TAIL = math.log(2.0)  # tokens with a larger |log ratio| are in the tail


@dataclass(frozen=True)
class Gap:
    """The comparison over the tokens of some buckets: means over `tokens`, and the maximum of |engine - trainer|.

    `approx_kl`: the estimator k3 of KL(engine || trainer). `tail`: share of tokens whose probabilities differ by more
    than a factor of 2. `ess`: relative effective sample size of the ratios trainer / engine. Without tokens all are 0,
    but `ess` is 1.
    """

    tokens: int
    logprob_abs_diff: float
    logprob_abs_diff_max: float
    approx_kl: float
    tail: float
    ess: float

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Gap:
        """Return the comparison of all tokens of some buckets, given by rows of `OriginGaps.filled`."""
        columns = [*zip(*rows, strict=True)] if rows else [(0.0,)] * (len(KEYS) + 1)
        sums = dict(zip(KEYS, map(math.fsum, columns[:-1]), strict=True))
        tokens = max(sums["tokens"], 1.0)
        squared = tokens * sums["ratio_squared"]
        return cls(
            tokens=int(sums["tokens"]),
            logprob_abs_diff=sums["logprob_abs_diff"] / tokens,
            logprob_abs_diff_max=max(columns[-1]),
            approx_kl=sums["approx_kl"] / tokens,
            tail=sums["tail"] / tokens,
            ess=sums["ratio"] ** 2 / squared if squared else 1.0,
        )


class OriginGaps:
    """`sums_BK` and `maxima_B`, fp64. `add` works in place and does not synchronise the device."""

    def __init__(self, sums_BK: Tensor, maxima_B: Tensor) -> None:
        self.sums_BK, self.maxima_B = sums_BK, maxima_B

    @classmethod
    def zeros(cls, buckets: int, device: torch.device | str = "cpu") -> OriginGaps:
        """Return statistics of no tokens, on `device`."""
        sums_BK = torch.zeros(buckets, len(KEYS), dtype=torch.float64, device=device)
        return cls(sums_BK, torch.zeros(buckets, dtype=torch.float64, device=device))

    def add(self, engine_R: Tensor, trainer_R: Tensor, keep_R: Tensor, source_R: Tensor) -> None:
        """Add tokens: log-probs under engine and trainer, and bucket (int64) or NO_SOURCE, all [R].

        Tokens without a source, and values where `keep_R` (bool) is False, even NaN, are ignored.
        """
        keep_R = keep_R.bool() & (source_R != NO_SOURCE)
        source_R = source_R.clamp(min=0)
        difference_R = trainer_R.detach().double() - engine_R.detach().double()
        log_ratio_R = torch.where(keep_R, difference_R, torch.zeros_like(difference_R))
        kept_R, distance_R = keep_R.double(), log_ratio_R.abs()
        bounded_R = log_ratio_R.clamp(max=MAX_LOGGED_LOG_RATIO).exp()
        ratio_R = bounded_R * kept_R
        kl_R = bounded_R - 1.0 - log_ratio_R
        tail_R = (distance_R > TAIL).double()
        values_RK = torch.stack([kept_R, distance_R, kl_R, ratio_R, ratio_R.square(), tail_R], dim=1)
        self.sums_BK.index_add_(0, source_R, values_RK)
        self.maxima_B.scatter_reduce_(0, source_R, distance_R, "amax")

    def merge(self, other: OriginGaps) -> None:
        """Add the tokens of `other`, which has the same buckets."""
        self.sums_BK += other.sums_BK
        torch.maximum(self.maxima_B, other.maxima_B, out=self.maxima_B)

    @classmethod
    def from_vectors(cls, sums: Tensor, maxima_B: Tensor) -> OriginGaps:
        """Return the statistics with these reduced sums, [B * K], and maxima, [B]."""
        return cls(sums.reshape(maxima_B.numel(), len(KEYS)), maxima_B)

    def filled(self) -> dict[int, list[float]]:
        """Return sums and maximum of each bucket with tokens; `Gap.of` turns them into means."""
        rows = torch.cat([self.sums_BK, self.maxima_B[:, None]], dim=1).tolist()
        return {bucket: row for bucket, row in enumerate(rows) if row[0]}
