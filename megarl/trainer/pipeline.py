"""Runs micro-batches through Megatron's own schedules (no pipeline, 1F1B, interleaved), with and without backward.

Shapes: T tokens of a micro-batch (T / TP under sequence parallelism), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.models.shards import unwrap
from megarl.trainer.batch import MicroBatch

Result = TypeVar("Result")
# (the last stage's model chunk, its hidden states [1, T, H], the micro-batch) -> the result of the pass.
ForwardOnly = Callable[[GPTModel, Tensor, MicroBatch], Result]
# The same -> (loss to be summed over micro-batches and ranks, tokens of the micro-batch, a result to return).
WithLoss = Callable[[GPTModel, Tensor, MicroBatch], tuple[Tensor, int, Result]]


def forward_only(
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], function: ForwardOnly[Result]
) -> list[Result]:
    """Run all micro-batches through the pipeline in one pass, without gradients, in evaluation mode.

    Returns the results of `function` in micro-batch order on the last stage, [] on the other stages.
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
    chunks: Sequence[torch.nn.Module], micro_batches: Sequence[MicroBatch], function: WithLoss[Result]
) -> list[Result]:
    """Run forward and backward of all micro-batches. Megatron reduces and scales the gradients at the end.

    Returns the third results of `function` in micro-batch order on the last stage, [] on the other stages.
    """
    return _run(chunks, micro_batches, function, backward=True)


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    function: ForwardOnly[Any],
    *,
    backward: bool,
) -> list[Any]:  # Megatron's schedules are untyped
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, function=function),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Megatron requires a value, but with variable_seq_lengths the stages send each other the true shapes.
        seq_length=max(batch.input_ids_1T.shape[1] for batch in micro_batches),
        micro_batch_size=1,
        forward_only=not backward,
        collect_non_loss_data=not backward,
    )


def _forward_step(
    iterator: Iterator[MicroBatch], model: torch.nn.Module, *, function: ForwardOnly[Any]
) -> tuple[Tensor, Callable[..., object]]:
    """Run one micro-batch through one model chunk, as Megatron's schedules call it.

    Returns the chunk's output, and the function that the schedule calls on the last stage's output.
    """
    batch = next(iterator)
    chunk = unwrap(model)
    arguments: dict[str, Any] = {}
    if chunk.config.bf16:
        arguments["fp32_output"] = False  # the output is hidden states; only the log-probs are computed in fp32
    if chunk.config.num_moe_experts:
        arguments["padding_mask"] = _padding_mask(chunk, batch)
    output_1TH = model(
        input_ids=batch.input_ids_1T,
        position_ids=batch.position_ids_1T,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params(),
        **arguments,
    )

    def loss_func(hidden_1TH: Tensor, non_loss_data: bool = False) -> object:
        result = function(chunk, hidden_1TH, batch)
        if non_loss_data:
            return result
        loss, tokens, report = result
        return loss, torch.tensor(tokens, dtype=torch.int, device=loss.device), report

    return output_1TH, loss_func


def _padding_mask(chunk: GPTModel, batch: MicroBatch) -> Tensor | None:
    """Return the mask of the tokens that routers must not balance, bool [1, rows of this chunk], or None."""
    mask_1T = batch.padding_mask()
    if mask_1T is not None and chunk.config.sequence_parallel and not chunk.pre_process:
        # Megatron scatters the mask over the tensor ranks on the first stage only.
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        mask_1T = mask_1T.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return mask_1T
