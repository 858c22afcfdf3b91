"""The proximal policy's log-probs without a forward pass: interpolated by version (AReaL's `loglinear`).

Shapes: R response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def interpolation(lags: Sequence[int], updates: int) -> Tensor:
    """Return the share alpha of the current policy in the proximal one, fp32 [R], each in [0, 1].

    `lags`: of each token, the number of optimizer updates from the weights that sampled it to the proximal policy's.
    `updates`: from there to the current policy's. It is lag / (lag + updates), and 1 if the current policy is the
    proximal one. With versions b (sampling), v (proximal) and w (current) that is AReaL's (v - b) / (w - b)
    (1.0.4, trainer/ppo/actor.py). AReaL always takes v = w - 1, where w counts steps; here v is the version before the
    first update of the step, which is what a log-prob pass would use.

    Raises ValueError for a token of newer weights than the proximal policy's.
    """
    if min(lags, default=0) < 0:
        raise ValueError(f"a token was sampled by weights {-min(lags)} updates newer than those of the step")
    lag_R = torch.tensor(lags, dtype=torch.float32)
    if updates == 0:
        return torch.ones_like(lag_R)
    return lag_R / (lag_R + updates)


def loglinear(current_R: Tensor, sampling_R: Tensor, alpha_R: Tensor) -> Tensor:
    """Return (1 - alpha) log q + alpha log pi of each token, [R], detached: the geometric mean of two probabilities.

    `current_R` (log pi) and `sampling_R` (log q): log-probs of the current policy and of the one that sampled;
    `alpha_R`: `interpolation`. Where alpha is 1 the result is the current log-prob, bit for bit.
    """
    current_R = current_R.detach()
    sampling_R = sampling_R.to(current_R.dtype)
    mixed_R = sampling_R + alpha_R.to(current_R.dtype) * (current_R - sampling_R)
    return torch.where(alpha_R == 1.0, current_R, mixed_R)
