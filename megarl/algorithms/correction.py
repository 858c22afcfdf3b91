"""Corrections for tokens that another policy sampled than the one that is updated: importance weights of token losses.

Three policies meet in an update: the one that sampled (the engine's log-probs; of older weights if generation ran
ahead, and of another implementation in any case), the proximal one (the trainer's before the first update of the step)
and the current one. PPO's ratio is current / proximal; its clip bounds what the step's own updates change. The weight
is proximal / sampling, and carries no gradient. Their product is the importance ratio current / sampling. This is the
decoupled objective (arXiv:2110.00641; AReaL, arXiv:2505.24298), here with a cap on the weight.

Shapes: R response tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

CorrectionKind = Literal["token_tis"]

# As in verl; exp(20) = 5e8 is finite in fp32 and above any useful cap, exp(-20) = 2e-9 keeps a weight positive.
MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True)
class CorrectionSpec:
    """A correction and its cap, as in the config section `algorithm.correction`."""

    kind: CorrectionKind
    cap: float


@dataclass(frozen=True)
class TokenWeights:
    """`weights_R`: [R], detached, 0 where masked. `capped_R`: [R] bool, the tokens whose weight the cap has cut."""

    weights_R: Tensor
    capped_R: Tensor


def importance_weights(
    proximal_R: Tensor, sampling_R: Tensor, keep_R: Tensor, correction: CorrectionSpec
) -> TokenWeights:
    """Return the weight of each token's policy loss.

    `token_tis`: truncated importance sampling per token, min(pi_proximal / pi_sampling, cap) (Ionides 2008;
    fengyao.notion.site/off-policy-rl). It equals verl's `rollout_is: token` with `rollout_is_threshold: cap` (0.9.1,
    rollout_corr_helper.py) and TRL's `vllm_importance_sampling_mode: token_truncate`.

    `proximal_R`, `sampling_R`: log-probs, [R], at the sampling temperature; the weights are in their dtype, at least
    fp32. `keep_R` (bool) marks the trained tokens. What stands elsewhere, NaN included, is ignored.
    """
    dtype = torch.promote_types(proximal_R.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=proximal_R.device)
    difference_R = proximal_R.detach().to(dtype) - sampling_R.detach().to(dtype)
    ratio_R = torch.where(keep_R, difference_R, zero).clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    capped_R = keep_R & (ratio_R > correction.cap)
    return TokenWeights(torch.where(keep_R, ratio_R.clamp(max=correction.cap), zero), capped_R)
