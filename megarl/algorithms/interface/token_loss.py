"""The interface of policy losses: the inputs for one micro-batch, and the result.

A loss is a pure function of inputs and options that returns one number per response token. Weights, counts, corrections
and other terms are applied elsewhere (`megarl.algorithms.objective.objective`).

Shapes: R response tokens, S sequences. torch is only imported to compute a loss, so a config can be checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.algorithms.interface.registry import FunctionRegistry

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) = 5e8 is far outside any useful ratio, and finite in fp32. No gradient flows beyond this bound.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class TokenInputs:
    """The inputs of a loss, [R] each, of S whole sequences laid end to end.

    Values are fp32 (fp64 in tests), and 0 at masked tokens. Only `logprobs_R` has a gradient.
    """

    logprobs_R: Tensor  # of the sampled tokens under the current policy, at the sampling temperature
    old_logprobs_R: Tensor  # under the old policy, the denominator of the ratio
    advantages_R: Tensor
    keep_R: Tensor  # bool: the tokens that are trained
    cu_seqlens: Tensor  # int32 [S + 1]

    @classmethod
    def of(
        cls, logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, mask_R: Tensor, cu_seqlens: Tensor
    ) -> TokenInputs:
        """Return the inputs; values where `mask_R` (bool or 0/1) is 0, even NaN, become 0.

        Raises ValueError if shapes differ or `cu_seqlens` is malformed.
        """
        import torch

        from megarl.algorithms.interface.segments import check_packed

        check_packed(cu_seqlens, logprobs_R, old_logprobs_R, advantages_R, mask_R)
        keep_R = mask_R.bool()
        dtype = torch.promote_types(logprobs_R.dtype, torch.float32)
        zero = torch.zeros((), dtype=dtype, device=logprobs_R.device)

        def kept(values_R: Tensor) -> Tensor:
            return torch.where(keep_R, values_R.to(dtype), zero)

        old, advantages = old_logprobs_R.detach(), advantages_R.detach()
        return cls(kept(logprobs_R), kept(old), kept(advantages), keep_R, cu_seqlens)

    @property
    def log_ratio(self) -> Tensor:
        """log(new / old) of each token, [R] with gradient."""
        return self.logprobs_R - self.old_logprobs_R

    @property
    def ratio(self) -> Tensor:
        """The importance ratio new / old of each token, [R] with gradient; bounded by exp(MAX_LOG_RATIO)."""
        return self.log_ratio.clamp(max=MAX_LOG_RATIO).exp()

    def sequence_means(self, values_R: Tensor) -> Tensor:
        """Return the mean over each sequence's trained tokens, [S]; 0 if it has none."""
        kept_R = self.keep_R.to(values_R.dtype)
        return self._sums(values_R * kept_R) / self._sums(kept_R).clamp(min=1.0)

    def of_sequences(self, values_S: Tensor) -> Tensor:
        """Return each token's sequence value, [R]."""
        return values_S[self._ids()]

    def _sums(self, values_R: Tensor) -> Tensor:
        from megarl.algorithms.interface.segments import segment_sum

        return segment_sum(values_R, self._ids(), self.cu_seqlens.numel() - 1)

    def _ids(self) -> Tensor:
        from megarl.algorithms.interface.segments import sequence_ids

        return sequence_ids(self.cu_seqlens, self.logprobs_R.numel())


@dataclass(frozen=True)
class TokenLoss:
    """The result of a loss, [R] each. Values at masked tokens are dropped.

    `loss_R` has a gradient. The others are for statistics: `ratio_R`, the importance ratio (None: the token's);
    `low_R`, `high_R`, `dual_R` (bool; None: no token), tokens bounded below, above, or by a second bound.
    """

    loss_R: Tensor
    ratio_R: Tensor | None = None
    low_R: Tensor | None = None
    high_R: Tensor | None = None
    dual_R: Tensor | None = None


LOSSES: FunctionRegistry[TokenInputs, TokenLoss] = FunctionRegistry("loss")
