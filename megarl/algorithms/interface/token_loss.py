"""The interface of policy losses: what a loss is given for one micro-batch, and what it returns.

A loss is a pure function of these inputs, and of its options: one number per response token. How token losses become
one number (weights, counts, corrections, the other terms) is no part of it (`megarl.algorithms.objective.objective`).

Shapes: R response tokens, S sequences. Nothing here imports torch before a loss is computed, so that a config can be
checked without it.
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

    All values are fp32 (fp64 in tests), and 0 at masked tokens, whatever stood there. Only `logprobs_R` has a gradient.
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
        """Return the inputs of these tensors. What stands where `mask_R` (bool or 0/1) is 0, NaN too, is dropped.

        Raises ValueError if their shapes differ, or `cu_seqlens` is none.
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
        """Return the mean over the trained tokens of each sequence, [S]; 0 for a sequence without any."""
        kept_R = self.keep_R.to(values_R.dtype)
        return self._sums(values_R * kept_R) / self._sums(kept_R).clamp(min=1.0)

    def of_sequences(self, values_S: Tensor) -> Tensor:
        """Return for each token the value of its sequence, [R]."""
        return values_S[self._ids()]

    def _sums(self, values_R: Tensor) -> Tensor:
        from megarl.algorithms.interface.segments import segment_sum

        return segment_sum(values_R, self._ids(), self.cu_seqlens.numel() - 1)

    def _ids(self) -> Tensor:
        from megarl.algorithms.interface.segments import sequence_ids

        return sequence_ids(self.cu_seqlens, self.logprobs_R.numel())


@dataclass(frozen=True)
class TokenLoss:
    """The result of a loss, [R] each. What stands at masked tokens is dropped.

    `loss_R`: with gradient. The others are for the statistics only: `ratio_R`, the importance ratio (None: that of the
    token); `low_R`, `high_R`, `dual_R` (bool; None: no token), the tokens that were bounded below, above, or by a
    second bound.
    """

    loss_R: Tensor
    ratio_R: Tensor | None = None
    low_R: Tensor | None = None
    high_R: Tensor | None = None
    dual_R: Tensor | None = None


LOSSES: FunctionRegistry[TokenInputs, TokenLoss] = FunctionRegistry("loss")
