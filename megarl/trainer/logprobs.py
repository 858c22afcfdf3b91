"""Log-probs and entropy of given tokens over a vocabulary split over tensor-parallel ranks, in chunks of rows, in fp32.

Shapes: T rows (tokens), H hidden size, V true vocabulary, Vp this rank's share of the padded vocabulary.

The output projection is part of the chunked computation: from hidden states [T, H] and the output weight [Vp, H] a
chunk of logits is made, reduced to five numbers per row and dropped; backward makes it again. So neither [T, V] nor
[T, Vp] exists in any precision, only [chunk, Vp]. Two small all-reduces per call ([T] and [3, T]) join the shares.
Padded vocabulary columns are cut off before anything is computed: they never enter a softmax.

Megatron's `vocab_parallel_cross_entropy` is not used: it needs all logits at once, has no entropy, and overwrites
fp32 logits in place with their softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp


def linear_token_logprobs(
    hidden_TH: Tensor,
    weight_VpH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk: int,
    group: ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight^T / temperature) at the targets, and the entropy of that softmax if asked for.

    `hidden_TH` [T, H] is the same on every rank of the tensor-parallel `group`; its gradient here is only this rank's
    share, to be summed over the group (Megatron's copy/gather regions do that). `targets_T` [T] int64 holds global
    token ids below `vocab_size`. Results are fp32 [T], equal on all ranks, differentiable in hidden and weight.
    """
    logprobs_T, entropy_T = _ChunkedLogProbs.apply(
        hidden_TH, weight_VpH, targets_T, temperature, vocab_size, chunk, group, with_entropy
    )
    return logprobs_T, entropy_T if with_entropy else None


def token_logprobs(
    logits_TVp: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk: int,
    group: ProcessGroup | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `linear_token_logprobs`, from this rank's logits [T, Vp] that exist already; they are never modified."""
    logprobs_T, entropy_T = _ChunkedLogProbs.apply(
        logits_TVp, None, targets_T, temperature, vocab_size, chunk, group, with_entropy
    )
    return logprobs_T, entropy_T if with_entropy else None


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,  # hidden [T, H], or logits [T, Vp] where there is no weight
        weight: Tensor | None,
        targets_T: Tensor,
        temperature: float,
        vocab_size: int,
        chunk: int,
        group: ProcessGroup | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        share = source.shape[1] if weight is None else weight.shape[0]
        start = share * _rank(group)
        columns = max(0, min(share, vocab_size - start))  # the rest is padding
        local_T = targets_T - start
        owned_T = (local_T >= 0) & (local_T < columns)
        local_T = torch.where(owned_T, local_T, 0)
        stats_4T = source.new_zeros((4, source.shape[0]), dtype=torch.float32)
        stats_4T[0].fill_(-torch.inf)
        if columns:
            for rows in _chunks(source.shape[0], chunk):
                scaled = _scaled_logits(source[rows], weight, columns, temperature)
                _reduce_rows(scaled, local_T[rows], stats_4T[:, rows], with_entropy)
        logprobs_T, lse_T, entropy_T = _join(stats_4T, owned_T, group, with_entropy)
        ctx.save_for_backward(source, weight, local_T, owned_T, lse_T, entropy_T)
        ctx.temperature, ctx.columns, ctx.chunk, ctx.with_entropy = temperature, columns, chunk, with_entropy
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, weight, local_T, owned_T, lse_T, entropy_T = ctx.saved_tensors
        grad_logprobs_T, grad_entropy_T = grads[0], grads[1] if ctx.with_entropy else None
        want_source, want_weight = ctx.needs_input_grad[:2]
        grad_source = torch.zeros_like(source) if want_source else None
        # fp32 sum over chunks, whatever the weight's precision.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
        if ctx.columns and not (grad_logprobs_T is None and grad_entropy_T is None):
            if grad_logprobs_T is None:
                grad_logprobs_T = torch.zeros_like(lse_T)
            columns = slice(0, ctx.columns)
            for rows in _chunks(source.shape[0], ctx.chunk):
                scaled = _scaled_logits(source[rows], weight, ctx.columns, ctx.temperature)
                grad = _grad_logits(
                    scaled, lse_T[rows], local_T[rows], owned_T[rows], grad_logprobs_T[rows] / ctx.temperature,
                    None if grad_entropy_T is None else grad_entropy_T[rows] / ctx.temperature, entropy_T[rows],
                ).to(source.dtype)  # fmt: skip
                if weight is None:
                    if grad_source is not None:
                        grad_source[rows, columns] = grad
                    continue
                if grad_source is not None:
                    torch.mm(grad, weight[columns], out=grad_source[rows])
                if grad_weight is not None:
                    _accumulate(grad_weight[columns], grad, source[rows])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_source, grad_weight, None, None, None, None, None, None


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def _scaled_logits(source: Tensor, weight: Tensor | None, columns: int, temperature: float) -> Tensor:
    """fp32 [chunk, columns], always a tensor of its own: the caller overwrites it."""
    if weight is None:
        return torch.div(source[:, :columns].float(), temperature)
    logits = torch.mm(source, weight[:columns].t())  # in the model's precision, as the engine does
    return logits.float().div_(temperature) if temperature != 1 else logits.float()


def _reduce_rows(scaled: Tensor, local: Tensor, stats_4C: Tensor, with_entropy: bool) -> None:
    """Overwrites `scaled`; writes max m, sum of exp(x - m), the target's x, and sum of exp(x - m) * (x - m)."""
    maximum = scaled.amax(dim=1)
    stats_4C[0] = maximum
    stats_4C[2] = scaled.gather(1, local[:, None]).squeeze(1)
    shifted = scaled.sub_(maximum[:, None])
    if with_entropy:
        exponentials = shifted.exp()
        stats_4C[3] = torch.linalg.vecdot(exponentials, shifted)
    else:
        exponentials = shifted.exp_()
    stats_4C[1] = exponentials.sum(dim=1)


def _join(
    stats_4T: Tensor, owned_T: Tensor, group: ProcessGroup | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Joins the ranks' shares -> the targets' log-probs, log-sum-exp, entropy (zeros unless asked for)."""
    local_max_T, sums_T, target_T, products_T = stats_4T
    maximum_T = local_max_T
    target_T = torch.where(owned_T, target_T, 0.0)
    if group is not None and group.size() > 1:
        maximum_T = local_max_T.clone()
        torch.distributed.all_reduce(maximum_T, op=ReduceOp.MAX, group=group)
        shift_T = local_max_T - maximum_T
        factor_T = shift_T.exp()
        # A rank that holds only padding has shift -inf and sums 0.
        shift_T = torch.where(factor_T > 0, shift_T, 0.0)
        shares_3T = torch.stack((sums_T * factor_T, target_T, (products_T + shift_T * sums_T) * factor_T))
        torch.distributed.all_reduce(shares_3T, group=group)
        sums_T, target_T, products_T = shares_3T
    log_sums_T = sums_T.log()
    entropy_T = log_sums_T - products_T / sums_T if with_entropy else torch.zeros_like(log_sums_T)
    # In this order: target - (maximum + log_sums) would round log_sums to the maximum's precision.
    return (target_T - maximum_T) - log_sums_T, maximum_T + log_sums_T, entropy_T


def _grad_logits(
    scaled: Tensor,
    lse: Tensor,
    local: Tensor,
    owned: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor,
) -> Tensor:
    """Gradient of g log p[target] + e H by x: g (1[target] - p) - e p (log p + H). Overwrites x = `scaled`."""
    if grad_entropy is None:
        grad = scaled.sub_(lse[:, None]).exp_().mul_(-grad_logprobs[:, None])
    else:
        log_p = scaled.sub_(lse[:, None])
        factor = torch.addcmul(
            (-grad_logprobs - grad_entropy * entropy)[:, None], log_p, grad_entropy[:, None], value=-1
        )
        grad = log_p.exp_().mul_(factor)
    return grad.scatter_add_(1, local[:, None], (grad_logprobs * owned)[:, None])


def _accumulate(total: Tensor, grad: Tensor, source: Tensor) -> None:
    if total.dtype == grad.dtype:
        total.addmm_(grad.t(), source)
    else:
        total.add_(torch.mm(grad.t(), source))
