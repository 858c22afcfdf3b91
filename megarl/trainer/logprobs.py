"""Log-probs and entropy of given tokens over a vocabulary split over tensor-parallel ranks, in chunks of rows, in fp32.

Shapes: T tokens of a micro-batch on this context-parallel rank (T / TP under sequence parallelism), R rows (one per
response token), O those of this context-parallel rank (all without context parallelism), C rows of a chunk, H hidden
size, V true vocabulary, Vp this rank's share of the padded vocabulary, Vt its columns without padding.

A chunk of logits is computed from hidden states [R, H] and the output weight [Vp, H], reduced to four numbers per row,
and dropped; the backward pass recomputes it. So only [C, Vt] exists, never [R, V] or [R, Vp]. Two small all-reduces
per call ([R] and [3, R]) combine the ranks' shares. Padded vocabulary columns are cut off first, so they never enter a
softmax.

Megatron's `vocab_parallel_cross_entropy` is not used: it needs all logits at once, computes no entropy, and overwrites
fp32 logits with their softmax. GPTModel would also return all logits, so its output layer is made to return the hidden
states, and only rows that predict a response token are projected.
"""

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup, ReduceOp

from megarl.trainer import compiled_head
from megarl.trainer.batch import MicroBatch
from megarl.trainer.compiled_head import RowTerms

CACHED = 1 << 17  # logits that a CPU reduces at a time: with their exponentials 1 MiB, which stays in its cache


def return_hidden_states(chunk: GPTModel) -> None:
    """Make `chunk.forward` return the final hidden states [1, T or T / TP, H] instead of logits (last stage only).

    The output layer is still called as a module, so DDP's hooks on its weight run.
    """
    if not chunk.post_process:
        return

    def forward(hidden_T1H: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        return hidden_T1H, None

    chunk.output_layer.forward = forward


def response_logprobs(
    chunk: GPTModel,
    hidden_1TH: Tensor,
    batch: MicroBatch,
    *,
    temperature: float | Tensor,
    vocab_size: int,
    chunk_rows: int,
    with_entropy: bool,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies (None unless `with_entropy`), fp32 [R], of the response tokens of `batch`.

    `chunk`: the last stage's model chunk; `chunk_rows`: rows per chunk of logits; `temperature` and `compiled`: as in
    `linear_token_logprobs`. Results are equal on all tensor and context-parallel ranks; gradients are those of this
    rank's rows.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    hidden_TH = hidden_1TH[0]
    if chunk.config.sequence_parallel:
        hidden_OH = gather_from_sequence_parallel_region(hidden_TH, group=group).index_select(0, batch.rows_O)
    else:
        hidden_OH = copy_to_tensor_model_parallel_region(hidden_TH.index_select(0, batch.rows_O), group=group)
    targets_O, own_O = batch.targets_R, batch.own_O
    if own_O is not None:
        targets_O = targets_O[own_O]
        temperature = temperature[own_O] if isinstance(temperature, Tensor) else temperature
    logprobs_O, entropy_O = linear_token_logprobs(
        hidden_OH,
        output_weight(chunk),
        targets_O,
        temperature=temperature,
        vocab_size=vocab_size,
        chunk=chunk_rows,
        group=group,
        with_entropy=with_entropy,
        compiled=compiled,
    )
    if own_O is None:
        return logprobs_O, entropy_O
    rows = len(batch.targets_R)
    return _of_all_ranks(logprobs_O, own_O, rows), None if entropy_O is None else _of_all_ranks(entropy_O, own_O, rows)


def _of_all_ranks(values_O: Tensor, own_O: Tensor, rows: int) -> Tensor:
    """Return the values of all context-parallel ranks, [R] with R = `rows`.

    All ranks compute the same loss, so the backward pass takes each rank's own gradients and sums none.
    """
    whole_R = values_O.new_zeros(rows).index_copy(0, own_O, values_O)
    return reduce_from_tensor_model_parallel_region(whole_R, group=parallel_state.get_context_parallel_group())


def output_weight(chunk: GPTModel) -> torch.nn.Parameter:
    """Return this rank's rows of the output projection, [padded vocabulary / TP, H]."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight


def linear_token_logprobs(
    hidden_RH: Tensor,
    weight_VpH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float | Tensor,
    vocab_size: int,
    chunk: int,
    group: ProcessGroup | None = None,
    with_entropy: bool = False,
    compiled: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return log softmax(hidden @ weight^T / temperature) at the targets and, if requested, that softmax's entropy.

    `hidden_RH` is equal on every rank of the tensor-parallel `group`; its gradient here is this rank's share, to be
    summed over the group (Megatron's copy and gather regions do that). `targets_R`: int64, global token ids below
    `vocab_size`. `temperature`: one number, or fp32 [R]. `chunk`: rows per chunk of logits. `compiled`: use
    `compiled_head` if it compiles. Results are fp32 [R], equal on all ranks, differentiable in hidden states and
    weight.
    """
    logprobs_R, entropy_R = _ChunkedLogProbs.apply(
        hidden_RH, weight_VpH, targets_R, temperature, vocab_size, chunk, group, with_entropy, compiled
    )
    return logprobs_R, entropy_R if with_entropy else None


class _Context(FunctionCtx):
    """Types of torch's attributes, and of those that the forward pass keeps for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    temperature: float | Tensor
    columns: int
    chunk: int
    with_entropy: bool
    compiled: bool


class _ChunkedLogProbs(torch.autograd.Function):
    """The chunked computation of `linear_token_logprobs`, forward and backward."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden_RH: Tensor,
        weight_VpH: Tensor,
        targets_R: Tensor,
        temperature: float | Tensor,
        vocab_size: int,
        chunk: int,
        group: ProcessGroup | None,
        with_entropy: bool,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        share = weight_VpH.shape[0]
        start = share * (0 if group is None else group.rank())
        columns = max(0, min(share, vocab_size - start))  # the rest is padding
        local_R = targets_R - start
        owned_R = (local_R >= 0) & (local_R < columns)
        local_R = torch.where(owned_R, local_R, 0)
        stats_4R = hidden_RH.new_zeros((4, hidden_RH.shape[0]), dtype=torch.float32)
        stats_4R[0].fill_(-torch.inf)
        if columns:
            for rows in _chunks(hidden_RH.shape[0], chunk):
                logits_CVt = _logits(hidden_RH[rows], weight_VpH, columns)
                own = _of_rows(temperature, rows)
                _row_stats(logits_CVt, local_R[rows], stats_4R[:, rows], own, with_entropy, compiled)
                del logits_CVt  # before the next chunk is made
        logprobs_R, lse_R, entropy_R = _join(stats_4R, owned_R, group, with_entropy)
        ctx.save_for_backward(hidden_RH, weight_VpH, local_R, owned_R, lse_R, entropy_R)
        ctx.temperature, ctx.columns, ctx.chunk, ctx.with_entropy = temperature, columns, chunk, with_entropy
        ctx.compiled = compiled
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_R)
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: _Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VpH, local_R, owned_R, lse_R, entropy_R = ctx.saved_tensors
        grad_logprobs_R, grad_entropy_R = grads[0], grads[1] if ctx.with_entropy else None
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden_RH = torch.zeros_like(hidden_RH) if want_hidden else None
        # Chunks are summed in fp32, whatever the weight's precision.
        grad_weight_VpH = torch.zeros_like(weight_VpH, dtype=torch.float32) if want_weight else None
        if ctx.columns and not (grad_logprobs_R is None and grad_entropy_R is None):
            if grad_logprobs_R is None:
                grad_logprobs_R = torch.zeros_like(lse_R)
            columns = slice(0, ctx.columns)
            for rows in _chunks(hidden_RH.shape[0], ctx.chunk):
                own = _of_rows(ctx.temperature, rows)
                terms = RowTerms(
                    lse_R[rows], local_R[rows], owned_R[rows], grad_logprobs_R[rows] / own,
                    None if grad_entropy_R is None else grad_entropy_R[rows] / own, entropy_R[rows],
                )  # fmt: skip
                grad_CVt = _row_grads(_logits(hidden_RH[rows], weight_VpH, ctx.columns), terms, own, ctx.compiled)
                if grad_hidden_RH is not None:
                    torch.mm(grad_CVt, weight_VpH[columns], out=grad_hidden_RH[rows])
                if grad_weight_VpH is not None:
                    _accumulate(grad_weight_VpH[columns], grad_CVt, hidden_RH[rows])
                del grad_CVt
        if grad_weight_VpH is not None:
            grad_weight_VpH = grad_weight_VpH.to(weight_VpH.dtype)
        return grad_hidden_RH, grad_weight_VpH, None, None, None, None, None, None, None


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def _logits(hidden_CH: Tensor, weight_VpH: Tensor, columns: int) -> Tensor:
    """Return the logits [C, Vt], Vt = `columns`, in the model's precision as in the engine."""
    return torch.mm(hidden_CH, weight_VpH[:columns].t())


def _of_rows(temperature: float | Tensor, rows: slice) -> float | Tensor:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _scale(logits_CVt: Tensor, temperature: float | Tensor) -> Tensor:
    """Return logits / temperature in fp32, for callers to overwrite. May overwrite the logits."""
    if isinstance(temperature, Tensor):
        return logits_CVt.float().div_(temperature[:, None])
    return logits_CVt.float().div_(temperature) if temperature != 1 else logits_CVt.float()


def _row_stats(
    logits_CVt: Tensor,
    local_C: Tensor,
    stats_4C: Tensor,
    temperature: float | Tensor,
    with_entropy: bool,
    compiled: bool,
) -> None:
    """Write the four numbers per row of `_reduce_rows` into `stats_4C`. May overwrite the logits."""
    fused_4C = compiled_head.row_stats(logits_CVt, local_C, temperature, with_entropy) if compiled else None
    if fused_4C is not None:
        stats_4C.copy_(fused_4C)
    else:
        _reduce_rows(_scale(logits_CVt, temperature), local_C, stats_4C, with_entropy)


def _row_grads(logits_CVt: Tensor, terms: RowTerms, temperature: float | Tensor, compiled: bool) -> Tensor:
    """Return the gradient by the scaled logits, [C, Vt] in the logits' dtype. May overwrite the logits."""
    grad_CVt = compiled_head.grad_logits(logits_CVt, terms, temperature) if compiled else None
    return _grad_logits(_scale(logits_CVt, temperature), terms).to(logits_CVt.dtype) if grad_CVt is None else grad_CVt


def _reduce_rows(scaled_CVt: Tensor, local_C: Tensor, stats_4C: Tensor, with_entropy: bool) -> None:
    """Write four numbers per row into `stats_4C`, and overwrite `scaled_CVt`.

    The maximum m, the sum of exp(x - m), the target's x, and (only with entropy) the sum of exp(x - m) * (x - m).
    """
    count, columns = scaled_CVt.shape
    block = max(1, CACHED // columns) if scaled_CVt.device.type == "cpu" else count
    for rows in _chunks(count, block):
        _reduce_block(scaled_CVt[rows], local_C[rows], stats_4C[:, rows], with_entropy)


def _reduce_block(scaled_CVt: Tensor, local_C: Tensor, stats_4C: Tensor, with_entropy: bool) -> None:
    maximum_C = scaled_CVt.amax(dim=1)
    stats_4C[0] = maximum_C
    stats_4C[2] = scaled_CVt.gather(1, local_C[:, None]).squeeze(1)
    shifted_CVt = scaled_CVt.sub_(maximum_C[:, None])
    exponentials_CVt = shifted_CVt.exp() if with_entropy else shifted_CVt.exp_()
    stats_4C[1] = exponentials_CVt.sum(dim=1)
    if with_entropy:
        stats_4C[3] = shifted_CVt.mul_(exponentials_CVt).sum(dim=1)


def _join(
    stats_4R: Tensor, owned_R: Tensor, group: ProcessGroup | None, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the ranks' shares. Return the targets' log-probs, log-sum-exp and entropy (zeros if not requested)."""
    local_max_R, sums_R, target_R, products_R = stats_4R
    maximum_R = local_max_R
    target_R = torch.where(owned_R, target_R, 0.0)
    if group is not None and group.size() > 1:
        maximum_R = local_max_R.clone()
        torch.distributed.all_reduce(maximum_R, op=ReduceOp.MAX, group=group)
        shift_R = local_max_R - maximum_R
        factor_R = shift_R.exp()
        # A rank with only padding has shift -inf and sums 0.
        shift_R = torch.where(factor_R > 0, shift_R, 0.0)
        shares_3R = torch.stack((sums_R * factor_R, target_R, (products_R + shift_R * sums_R) * factor_R))
        torch.distributed.all_reduce(shares_3R, group=group)
        sums_R, target_R, products_R = shares_3R
    log_sums_R = sums_R.log()
    entropy_R = log_sums_R - products_R / sums_R if with_entropy else torch.zeros_like(log_sums_R)
    # In this order: target - (maximum + log_sums) would round log_sums to the maximum's precision.
    return (target_R - maximum_R) - log_sums_R, maximum_R + log_sums_R, entropy_R


def _grad_logits(scaled_CVt: Tensor, terms: RowTerms) -> Tensor:
    """Return the gradient defined in `RowTerms`, fp32 [C, Vt]. Overwrites `scaled_CVt`, the logits / temperature."""
    lse_C, local_C, owned_C, grad_logprobs_C, grad_entropy_C, entropy_C = terms
    if grad_entropy_C is None:
        grad_CVt = scaled_CVt.sub_(lse_C[:, None]).exp_().mul_(-grad_logprobs_C[:, None])
    else:
        log_p_CVt = scaled_CVt.sub_(lse_C[:, None])
        factor_CVt = torch.addcmul(
            (-grad_logprobs_C - grad_entropy_C * entropy_C)[:, None], log_p_CVt, grad_entropy_C[:, None], value=-1
        )
        grad_CVt = log_p_CVt.exp_().mul_(factor_CVt)
    return grad_CVt.scatter_add_(1, local_C[:, None], (grad_logprobs_C * owned_C)[:, None])


def _accumulate(total_VtH: Tensor, grad_CVt: Tensor, hidden_CH: Tensor) -> None:
    if total_VtH.dtype == grad_CVt.dtype:
        total_VtH.addmm_(grad_CVt.t(), hidden_CH)
    else:
        total_VtH.add_(torch.mm(grad_CVt.t(), hidden_CH))
