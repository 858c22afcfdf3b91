"""Micro-batches through Megatron's own schedules (none, 1F1B, interleaved), with and without backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.models.shards import unwrap
from megarl.trainer.batch import MicroBatch

# (last stage's chunk, its hidden states [1, T, H], the micro-batch) -> what the pass is for.
ForwardOnly = Callable[[GPTModel, Tensor, MicroBatch], Any]
# The same -> (loss to be summed over micro-batches and ranks, tokens of the micro-batch, anything to report).
WithLoss = Callable[[GPTModel, Tensor, MicroBatch], tuple[Tensor, int, Any]]


def forward_only(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], function: ForwardOnly
) -> list[Any]:
    """All micro-batches through the pipeline at once, without gradients, in evaluation mode.

    Returns `function`'s results in micro-batch order on the last stage, [] on the others.
    """
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            return _run(chunks, micro_batches, function, backward=False)
    finally:
        for chunk in chunks:
            chunk.train()


def forward_backward(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], function: WithLoss
) -> list[Any]:
    """Forward and backward of all micro-batches; gradients are reduced and scaled by Megatron at the end.

    Returns the third results of `function` on the last stage, [] on the others.
    """
    return _run(chunks, micro_batches, function, backward=True)


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    function: ForwardOnly | WithLoss,
    *,
    backward: bool,
) -> list[Any]:
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, function=function),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Only first guesses: with variable_seq_lengths the stages tell each other the shapes.
        seq_length=max(batch.input_ids.shape[1] for batch in micro_batches),
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )


def _forward_step(
    iterator: Iterator[MicroBatch], model: torch.nn.Module, *, function: Callable[..., Any]
) -> tuple[Tensor, Callable[..., Any]]:
    batch = next(iterator)
    chunk = unwrap(model)
    arguments: dict[str, Any] = {}
    if chunk.config.bf16:
        arguments["fp32_output"] = False  # hidden states; log-probs are made in fp32 from bf16 logits
    if chunk.config.num_moe_experts:
        arguments["padding_mask"] = _padding_mask(chunk, batch)
    output = model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params(),
        **arguments,
    )

    def finish(hidden: Tensor, non_loss_data: bool = False) -> Any:
        result = function(chunk, hidden, batch)
        if non_loss_data:
            return result
        loss, tokens, report = result
        return loss, torch.tensor(tokens, dtype=torch.int, device=loss.device), report

    return output, finish


def _padding_mask(chunk: GPTModel, batch: MicroBatch) -> Tensor | None:
    """What must not count in the routers' balancing, bool [1, rows], as this chunk takes it."""
    mask = batch.padding_mask()
    if mask is not None and chunk.config.sequence_parallel and not chunk.pre_process:
        # Megatron scatters the mask over the tensor ranks on the first stage only.
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        mask = mask.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return mask
