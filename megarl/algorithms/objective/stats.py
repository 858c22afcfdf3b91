"""Loss statistics as sums, counts and maxima under fixed keys, so that any split reduces to the same numbers.

Shapes: R response tokens, S sequences, K sum keys, M maximum keys, B buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.algorithms.correction.apply import TokenWeights
from megarl.algorithms.correction.stats import (
    CORRECTION_MAXIMA,
    CORRECTION_SUMS,
    correction_numbers,
    correction_statistics,
)

# The comparison of two policies on the same tokens; "old" and "new" are the moments of their log-probs.
PAIR_KEYS = (
    "ratio",
    "ratio_squared",
    "approx_kl",
    "logprob_abs_diff",
    "old",
    "new",
    "old_squared",
    "new_squared",
    "product",
)
CORRECTION = "correction_"  # prefix of the statistics of a correction
SAMPLING = "sampling_"  # prefix of the comparison of the sampling with the proximal policy
# Shares of the objective, before the terms' coefficients, and token counts of the terms.
SHARE_KEYS = ("loss", "policy_loss", "ref_kl_loss", "ce_loss")
COUNT_KEYS = ("tokens", "sequences", "ref_kl_tokens", "ce_tokens")
PER_TOKEN_KEYS = (
    "ratio",
    "ratio_squared",
    "clip_low",
    "clip_high",
    "clip_dual",
    "approx_kl",
    "logprob_abs_diff",
    "entropy",
)
SUM_KEYS = (
    *COUNT_KEYS,
    *SHARE_KEYS,
    *PER_TOKEN_KEYS,
    "kl_ref",
    "ce",
    "old",
    "new",
    "old_squared",
    "new_squared",
    "product",
    *(CORRECTION + key for key in CORRECTION_SUMS),
    *(SAMPLING + key for key in PAIR_KEYS),
)
PAIR_MAX_KEYS = ("ratio", "logprob_abs_diff")
MAX_KEYS = (
    *PAIR_MAX_KEYS,
    *(SAMPLING + key for key in PAIR_MAX_KEYS),
    *(CORRECTION + key for key in CORRECTION_MAXIMA),
)
MAX_LOGGED_LOG_RATIO = 50.0  # exp(50) = 5e21 and its square are far below the limit of fp64


@dataclass(frozen=True)
class LossStats:
    """fp64 0-dim tensors under SUM_KEYS and MAX_KEYS; every key is always present.

    Sums are over the tokens of the term `rl`, except COUNT_KEYS, SHARE_KEYS (shares of the objective), and `kl_ref` and
    `ce`, which are over their terms' tokens. Maxima are of quantities >= 0, and 0 if no token was trained. The keys of
    a correction (`correction_*`, `sampling_*`) are 0 without one.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> LossStats:
        """Return statistics of no tokens, on `device`."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(dict.fromkeys(SUM_KEYS, zero), dict.fromkeys(MAX_KEYS, zero))

    @classmethod
    def of_ratios(cls, ratio_R: Tensor, log_ratio_R: Tensor, keep_R: Tensor, cu_seqlens: Tensor) -> LossStats:
        """Return the statistics of importance ratios. All tensors are [R] but `cu_seqlens`, int [S + 1].

        `log_ratio_R`: each token's new minus old log-prob, 0 where masked; `keep_R` (bool): trained tokens. `approx_kl`
        is the estimator k3 of KL(old || new) from samples of the old policy, exp(log_ratio) - 1 - log_ratio, per token
        even under GSPO. `clip_*`, losses, entropy and `kl_ref` stay 0 for the caller to fill in.
        """
        stats = cls.zeros(ratio_R.device)
        kept_R = keep_R.double()
        ratio_R, log_ratio_R = ratio_R.double() * kept_R, log_ratio_R.double()
        cumulative = torch.cat([kept_R.new_zeros(1), kept_R.cumsum(0)])  # [R + 1]
        cuts = cu_seqlens.long()
        stats.sums["tokens"] = kept_R.sum()
        stats.sums["sequences"] = (cumulative[cuts[1:]] > cumulative[cuts[:-1]]).sum(dtype=torch.float64)
        stats.sums["ratio"] = ratio_R.sum()
        stats.sums["ratio_squared"] = ratio_R.square().sum()
        stats.sums["approx_kl"] = (log_ratio_R.clamp(max=MAX_LOGGED_LOG_RATIO).exp() - 1.0 - log_ratio_R).sum()
        stats.sums["logprob_abs_diff"] = log_ratio_R.abs().sum()
        if ratio_R.numel():
            stats.maxima["ratio"] = ratio_R.max()
            stats.maxima["logprob_abs_diff"] = log_ratio_R.abs().max()
        return stats

    @classmethod
    def of_pair(cls, old_R: Tensor, new_R: Tensor, keep_R: Tensor, cu_seqlens: Tensor) -> LossStats:
        """Return `of_ratios` of the token ratios, plus the moments from which `means` computes the correlation.

        `old_R`, `new_R`: log-probs under the two policies; values where `keep_R` is False are ignored.
        """
        zero = torch.zeros((), dtype=torch.float64, device=new_R.device)
        old_R = torch.where(keep_R, old_R.detach().double(), zero)
        new_R = torch.where(keep_R, new_R.detach().double(), zero)
        ratio_R = (new_R - old_R).clamp(max=MAX_LOGGED_LOG_RATIO).exp()
        stats = cls.of_ratios(ratio_R, new_R - old_R, keep_R, cu_seqlens)
        stats.add_moments(old_R, new_R)
        return stats

    def add_moments(self, old_R: Tensor, new_R: Tensor) -> None:
        """Set the moments of the two log-probs, fp64 [R] and 0 where masked."""
        self.sums["old"], self.sums["new"] = old_R.sum(), new_R.sum()
        self.sums["old_squared"], self.sums["new_squared"] = old_R.square().sum(), new_R.square().sum()
        self.sums["product"] = (old_R * new_R).sum()

    def add_correction(self, weights: TokenWeights, pair: LossStats) -> None:
        """Set the statistics of a correction, and `pair`: `of_pair` of the sampling and the proximal policy."""
        sums, maxima = correction_statistics(weights)
        self.sums.update({CORRECTION + key: value for key, value in sums.items()})
        self.maxima.update({CORRECTION + key: value for key, value in maxima.items()})
        self.sums.update({SAMPLING + key: pair.sums[key] for key in PAIR_KEYS})
        self.maxima.update({SAMPLING + key: pair.maxima[key] for key in PAIR_MAX_KEYS})

    def sum_vector(self) -> Tensor:
        """Return the sums in the order of SUM_KEYS, fp64 [K], to be all-reduced with SUM."""
        return torch.stack([self.sums[key] for key in SUM_KEYS])

    def max_vector(self) -> Tensor:
        """Return the maxima in the order of MAX_KEYS, fp64 [M], to be all-reduced with MAX."""
        return torch.stack([self.maxima[key] for key in MAX_KEYS])

    @classmethod
    def from_vectors(cls, sums_K: Tensor, maxima_M: Tensor) -> LossStats:
        """Return the statistics of a reduced `sum_vector` and `max_vector`."""
        sums = dict(zip(SUM_KEYS, sums_K.unbind(), strict=True))
        return cls(sums, dict(zip(MAX_KEYS, maxima_M.unbind(), strict=True)))

    @classmethod
    def merge(cls, parts: Iterable[LossStats], device: torch.device | str = "cpu") -> LossStats:
        """Return the statistics of the union of disjoint parts."""
        total = cls.zeros(device)
        for part in parts:
            for key in SUM_KEYS:
                total.sums[key] = total.sums[key] + part.sums[key]
            for key in MAX_KEYS:
                total.maxima[key] = torch.maximum(total.maxima[key], part.maxima[key])
        return total

    def means(self) -> dict[str, float]:
        """Return the numbers to report; call it on statistics merged over all micro-batches and ranks.

        Clip fractions and KL are per token. `ess` = (sum r)^2 / (n sum r^2) is the relative effective sample size, 1 on
        policy. `pearson` is the correlation of old and new log-probs, NaN if either of them does not vary.
        """
        sums = {key: float(value) for key, value in self.sums.items()}
        tokens = max(sums["tokens"], 1.0)
        result = {key: sums[key] / tokens for key in PER_TOKEN_KEYS}
        result["kl_ref"] = sums["kl_ref"] / max(sums["ref_kl_tokens"], 1.0)
        result["ce"] = sums["ce"] / max(sums["ce_tokens"], 1.0)
        result["clip_fraction"] = result["clip_low"] + result["clip_high"]
        result["ratio_max"] = float(self.maxima["ratio"])
        result["logprob_abs_diff_max"] = float(self.maxima["logprob_abs_diff"])
        covariance = tokens * sums["product"] - sums["old"] * sums["new"]
        variances = [tokens * sums[f"{name}_squared"] - sums[name] ** 2 for name in ("old", "new")]
        # Variances are differences of large sums: below the rounding error they count as zero.
        floors = [1e-12 * tokens * sums[f"{name}_squared"] for name in ("old", "new")]
        defined = all(variance > floor for variance, floor in zip(variances, floors, strict=True))
        result["pearson"] = covariance / math.sqrt(variances[0] * variances[1]) if defined else math.nan
        squared = tokens * sums["ratio_squared"]
        result["ess"] = sums["ratio"] ** 2 / squared if squared else 1.0
        result |= {key: sums[key] for key in SHARE_KEYS + COUNT_KEYS}
        return result

    def correction_means(self) -> dict[str, float]:
        """Return the numbers of a correction: `correction_numbers`, and `sampling_*`.

        `sampling_*` are the `means` of the comparison of the sampling (old) with the proximal policy (new).
        """
        counts = {key: self.sums[key] for key in ("tokens", "sequences")}
        pair = LossStats.zeros(self.sums["tokens"].device)
        pair.sums.update(counts | {key: self.sums[SAMPLING + key] for key in PAIR_KEYS})
        pair.maxima.update({key: self.maxima[SAMPLING + key] for key in PAIR_MAX_KEYS})
        sums = {key: float(self.sums[CORRECTION + key]) for key in CORRECTION_SUMS}
        maxima = {key: float(self.maxima[CORRECTION + key]) for key in CORRECTION_MAXIMA}
        numbers = correction_numbers(sums, maxima, float(self.sums["tokens"]), float(self.sums["sequences"]))
        return {SAMPLING + key: value for key, value in pair.means().items()} | numbers


# Engine against trainer by each token's source: sums and maxima per bucket, which reduce exactly over any split.
# A bucket stands for one replica and one version lag (`megarl/run/step/off_policy.py`).

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
