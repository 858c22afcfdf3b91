"""Off-policy corrections: weights and masks for the losses of tokens that another policy sampled.

An update involves three policies. The sampling policy is the engine's: another implementation, and older weights if
generation ran ahead. The proximal policy is the trainer's before the first update of the step. The third is the current
one. PPO's ratio is current / proximal; its clip bounds what the step's updates change. The weight is proximal /
sampling, without gradient; their product is the importance ratio current / sampling. This is the decoupled objective
(arXiv:2110.00641; AReaL, arXiv:2505.24298), with a bound on the weight, and masks for tokens and sequences where the
two policies are too far apart.

Shapes: R response tokens, S sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megarl.algorithms.correction.config import CorrectionSpec, WeightKind
from megarl.algorithms.correction.masks import LogRatios, Rejection, TrainedTokens, bounded_exp, reject

__all__ = ["CorrectionSpec", "TokenWeights", "importance_weights", "proximal_logprobs"]

# The proximal policy's log-probs without a forward pass: interpolated by version (AReaL's `loglinear`).


def interpolation(lags: Sequence[int], updates: int) -> Tensor:
    """Return the current policy's share alpha in the proximal one: lag / (lag + updates), fp32 [R], in [0, 1].

    `lags`: per token, optimizer updates from the weights that sampled it to the proximal policy's. `updates`: from
    there to the current policy's; with 0, alpha is 1. With versions b (sampling), v (proximal) and w (current) this is
    AReaL's (v - b) / (w - b) (1.0.4, trainer/ppo/actor.py). AReaL always takes v = w - 1, where w counts steps; here v
    is the version before the first update of the step, as in a log-prob pass.

    Raises ValueError for a token of newer weights than the proximal policy's.
    """
    if min(lags, default=0) < 0:
        raise ValueError(f"a token was sampled by weights {-min(lags)} updates newer than those of the step")
    lag_R = torch.tensor(lags, dtype=torch.float32)
    if updates == 0:
        return torch.ones_like(lag_R)
    return lag_R / (lag_R + updates)


def loglinear(current_R: Tensor, sampling_R: Tensor, alpha_R: Tensor) -> Tensor:
    """Return (1 - alpha) log q + alpha log pi of each token, [R], detached: a weighted geometric mean.

    `current_R` (log pi) and `sampling_R` (log q): log-probs of the current and the sampling policy; `alpha_R`:
    `interpolation`. With alpha 1 the result is the current log-prob, bit for bit.
    """
    current_R = current_R.detach()
    sampling_R = sampling_R.to(current_R.dtype)
    mixed_R = sampling_R + alpha_R.to(current_R.dtype) * (current_R - sampling_R)
    return torch.where(alpha_R == 1.0, current_R, mixed_R)


# Bounded importance weights p / q of token losses, without gradient.
#
# p is the probability of the sampled token under the proximal policy, q under the sampling policy. A sequence's weight
# applies to each of its tokens.


@dataclass(frozen=True)
class BoundedWeights:
    """`weights_R`: [R], detached, 0 where not trained. `capped_R`, `dropped_R`: [R] bool, cut at the cap, set to 0."""

    weights_R: Tensor
    capped_R: Tensor
    dropped_R: Tensor


def none(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return 1 for every trained token: the decoupled objective with equal policies."""
    neither_R = torch.zeros_like(ratios.keep_R)
    return BoundedWeights(ratios.keep_R.to(ratios.values_R.dtype), neither_R, neither_R)


def token_tis(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return min(p / q, cap) of each token: truncated importance sampling.

    Equals verl's `rollout_is: token` with `rollout_is_threshold: cap`, TRL's `token_truncate` and AReaL's `{level:
    token, action: clamp, metric: ratio, upper: cap}`. Ionides 2008; fengyao.notion.site/off-policy-rl.
    """
    return _truncated(ratios, bounded_exp(ratios.values_R), options.cap)


def sequence_tis(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return min(product of p / q over the sequence, cap) for each of its tokens.

    Equals verl's `rollout_is: sequence` and TRL's `sequence_truncate`. AReaL's sequence weight differs: the geometric
    mean, bounded only if the sequence is out of bounds. Ionides 2008; richardli.xyz/rl-collapse.
    """
    return _truncated(ratios, bounded_exp(ratios.sums(ratios.values_R))[ratios.ids_R], options.cap)


def icepop(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return p / q of each token inside [low, high], and 0 outside (IcePop, arXiv:2510.18855).

    Equals verl's `rollout_is: token` with `rollout_is_threshold: "low_high"`, TRL's `token_mask` and AReaL's
    `{level: token, action: mask, metric: ratio}`.
    """
    return _banded(ratios, bounded_exp(ratios.values_R), options)


def sequence_mis(ratios: LogRatios, options: CorrectionSpec) -> BoundedWeights:
    """Return the product of p / q over the sequence for each of its tokens if inside [low, high], else 0.

    Masked importance sampling, richardli.xyz/rl-collapse. Equals verl's `rollout_is: sequence` with
    `rollout_is_threshold: "low_high"` and TRL's default `sequence_mask`, whose only bound is 3 above.
    """
    return _banded(ratios, bounded_exp(ratios.sums(ratios.values_R))[ratios.ids_R], options)


def _truncated(ratios: LogRatios, ratio_R: Tensor, cap: float) -> BoundedWeights:
    capped_R = ratios.keep_R & (ratio_R > cap)
    weights_R = torch.where(ratios.keep_R, ratio_R.clamp(max=cap), ratio_R.new_zeros(()))
    return BoundedWeights(weights_R, capped_R, torch.zeros_like(capped_R))


def _banded(ratios: LogRatios, ratio_R: Tensor, options: CorrectionSpec) -> BoundedWeights:
    inside_R = (ratio_R >= options.low) & (ratio_R <= options.high)
    weights_R = torch.where(ratios.keep_R & inside_R, ratio_R, ratio_R.new_zeros(()))
    return BoundedWeights(weights_R, torch.zeros_like(inside_R), ratios.keep_R & ~inside_R)


# By config name.
WEIGHTS: dict[WeightKind, Callable[[LogRatios, CorrectionSpec], BoundedWeights]] = {
    "none": none,
    "token_tis": token_tis,
    "sequence_tis": sequence_tis,
    "icepop": icepop,
    "sequence_mis": sequence_mis,
}


@dataclass(frozen=True)
class TokenWeights:
    """The coefficient of each token's policy loss. `weights_R`: [R], detached, 0 where masked or not trained.

    `capped_R`: [R] bool, tokens cut at the cap that no mask excludes. `dropped_R`: [R] bool, trained tokens that a band
    or a mask excludes. `rejections`: the effect of each mask alone. `tokens`: the trained tokens.
    """

    tokens: TrainedTokens
    weights_R: Tensor
    capped_R: Tensor
    dropped_R: Tensor
    rejections: tuple[Rejection, ...] = field(default=())

    @property
    def rejected(self) -> Tensor:
        """The tokens that any mask excludes, [R] bool."""
        nothing_R = torch.zeros_like(self.dropped_R)
        return torch.stack([nothing_R, *(each.rejected_R for each in self.rejections)]).any(dim=0)


def importance_weights(
    proximal_R: Tensor, sampling_R: Tensor, keep_R: Tensor, correction: CorrectionSpec, *, cu_seqlens: Tensor
) -> TokenWeights:
    """Return the coefficient of each token's policy loss: the weight of `correction.kind`, 0 where a mask rejects.

    `proximal_R`, `sampling_R`: log-probs, [R], at the sampling temperature; the weights have their dtype, at least
    fp32. `keep_R` (bool) marks the trained tokens; other values, even NaN, are ignored. `cu_seqlens`: int32 [S + 1], of
    whole sequences.
    """
    ratios = LogRatios.between(proximal_R, sampling_R, keep_R, cu_seqlens)
    weights = WEIGHTS[correction.kind](ratios, correction)
    result = TokenWeights(
        ratios,
        weights.weights_R,
        weights.capped_R,
        weights.dropped_R,
        tuple(reject(ratios, option) for option in correction.masks),
    )
    if not result.rejections:
        return result
    rejected_R = result.rejected
    return replace(
        result,
        weights_R=torch.where(rejected_R, weights.weights_R.new_zeros(()), weights.weights_R),
        capped_R=weights.capped_R & ~rejected_R,
        dropped_R=weights.dropped_R | rejected_R,
    )


def proximal_logprobs(correction: CorrectionSpec, logprobs_R: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
    """Return the proximal policy's log-probs, [R], detached: the stream `old_logprobs`.

    Without it the proximal policy is the current one, as in a step's first update. `loglinear` interpolates by the
    streams `rollout_logprobs` and `proximal_alpha`.
    """
    if correction.proximal == "loglinear":
        return loglinear(logprobs_R, streams["rollout_logprobs"], streams["proximal_alpha"])
    return streams.get("old_logprobs", logprobs_R.detach())
