"""Loss statistics as sums, counts and maxima under fixed keys: any split reduces to the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SUM_KEYS = (
    "tokens",
    "sequences",
    "loss",
    "policy_loss",
    "ratio",
    "ratio_squared",
    "clip_low",
    "clip_high",
    "clip_dual",
    "approx_kl",
    "logprob_abs_diff",
    "entropy",
    "kl_ref",
    "old",
    "new",
    "old_squared",
    "new_squared",
    "product",
)
PER_TOKEN_KEYS = tuple(SUM_KEYS[4:13])
MAX_KEYS = ("ratio", "logprob_abs_diff")


@dataclass(frozen=True)
class LossStats:
    """fp64 0-dim tensors under SUM_KEYS and MAX_KEYS, every key always present.

    Sums over trained tokens, except `tokens` and `sequences` (counts), and `loss` and `policy_loss`
    (shares of the objective, which add up to it). Maxima are 0 where nothing was trained: both quantities
    are >= 0.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    @classmethod
    def zeros(cls, device: torch.device | str = "cpu") -> LossStats:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(dict.fromkeys(SUM_KEYS, zero), dict.fromkeys(MAX_KEYS, zero))

    @classmethod
    def of_ratios(cls, ratio_T: Tensor, log_ratio_T: Tensor, keep_T: Tensor, cu_seqlens: Tensor) -> LossStats:
        """Statistics of importance ratios; `log_ratio_T` = new - old log-prob of the token, 0 where masked.

        `approx_kl` is k3 for KL(old || new) from samples of old: exp(log_ratio) - 1 - log_ratio, per
        token also under GSPO. `clip_*`, losses, entropy and `kl_ref` are left 0 for the caller.
        """
        stats = cls.zeros(ratio_T.device)
        kept_T = keep_T.double()
        ratio_T, log_ratio_T = ratio_T.double() * kept_T, log_ratio_T.double()
        cumulative = torch.cat([kept_T.new_zeros(1), kept_T.cumsum(0)])
        cuts = cu_seqlens.long()
        stats.sums["tokens"] = kept_T.sum()
        stats.sums["sequences"] = (cumulative[cuts[1:]] > cumulative[cuts[:-1]]).sum(dtype=torch.float64)
        stats.sums["ratio"] = ratio_T.sum()
        stats.sums["ratio_squared"] = ratio_T.square().sum()
        stats.sums["approx_kl"] = (log_ratio_T.clamp(max=50.0).exp() - 1.0 - log_ratio_T).sum()
        stats.sums["logprob_abs_diff"] = log_ratio_T.abs().sum()
        if ratio_T.numel():
            stats.maxima["ratio"] = ratio_T.max()
            stats.maxima["logprob_abs_diff"] = log_ratio_T.abs().max()
        return stats

    @classmethod
    def of_pair(cls, old_T: Tensor, new_T: Tensor, keep_T: Tensor, cu_seqlens: Tensor) -> LossStats:
        """`of_ratios` with token ratios, plus the moments from which `means` takes the Pearson correlation."""
        zero = torch.zeros((), dtype=torch.float64, device=new_T.device)
        old_T = torch.where(keep_T, old_T.detach().double(), zero)
        new_T = torch.where(keep_T, new_T.detach().double(), zero)
        stats = cls.of_ratios((new_T - old_T).clamp(max=50.0).exp(), new_T - old_T, keep_T, cu_seqlens)
        stats.add_moments(old_T, new_T)
        return stats

    def add_moments(self, old_T: Tensor, new_T: Tensor) -> None:
        """Moments of the two log-probs, fp64 and 0 where masked."""
        self.sums["old"], self.sums["new"] = old_T.sum(), new_T.sum()
        self.sums["old_squared"], self.sums["new_squared"] = old_T.square().sum(), new_T.square().sum()
        self.sums["product"] = (old_T * new_T).sum()

    def sum_vector(self) -> Tensor:
        """[len(SUM_KEYS)], to be all-reduced with SUM."""
        return torch.stack([self.sums[key] for key in SUM_KEYS])

    def max_vector(self) -> Tensor:
        """[len(MAX_KEYS)], to be all-reduced with MAX."""
        return torch.stack([self.maxima[key] for key in MAX_KEYS])

    @classmethod
    def from_vectors(cls, sums: Tensor, maxima: Tensor) -> LossStats:
        return cls(dict(zip(SUM_KEYS, sums.unbind(), strict=True)), dict(zip(MAX_KEYS, maxima.unbind(), strict=True)))

    @classmethod
    def merge(cls, parts: Iterable[LossStats], device: torch.device | str = "cpu") -> LossStats:
        """The statistics of the union of disjoint parts."""
        total = cls.zeros(device)
        for part in parts:
            for key in SUM_KEYS:
                total.sums[key] = total.sums[key] + part.sums[key]
            for key in MAX_KEYS:
                total.maxima[key] = torch.maximum(total.maxima[key], part.maxima[key])
        return total

    def means(self) -> dict[str, float]:
        """Reported numbers of the union over all micro-batches and ranks.

        Clip fractions and KL are per token; `ess` = (sum r)^2 / (n sum r^2) is the relative effective sample
        size, 1 on policy. `pearson`, of old and new log-probs, is NaN where either of them does not vary.
        """
        sums = {key: float(value) for key, value in self.sums.items()}
        tokens = max(sums["tokens"], 1.0)
        result = {key: sums[key] / tokens for key in PER_TOKEN_KEYS}
        result["clip_fraction"] = result["clip_low"] + result["clip_high"]
        result["ratio_max"] = float(self.maxima["ratio"])
        result["logprob_abs_diff_max"] = float(self.maxima["logprob_abs_diff"])
        covariance = tokens * sums["product"] - sums["old"] * sums["new"]
        variances = [tokens * sums[f"{name}_squared"] - sums[name] ** 2 for name in ("old", "new")]
        # Differences of large sums: below rounding there is no variance, and no correlation.
        floors = [1e-12 * tokens * sums[f"{name}_squared"] for name in ("old", "new")]
        defined = all(variance > floor for variance, floor in zip(variances, floors, strict=True))
        result["pearson"] = covariance / math.sqrt(variances[0] * variances[1]) if defined else math.nan
        squared = tokens * sums["ratio_squared"]
        result["ess"] = sums["ratio"] ** 2 / squared if squared else 1.0
        result |= {key: sums[key] for key in ("loss", "policy_loss", "tokens", "sequences")}
        return result
