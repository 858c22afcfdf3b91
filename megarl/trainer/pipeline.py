"""Runs micro-batches through Megatron's schedules (no pipeline, 1F1B, interleaved), with and without backward.

Shapes: T tokens of a micro-batch (T / TP under sequence parallelism), H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.models.megatron.shards import unwrap
from megarl.trainer.batch import MicroBatch
from megarl.trainer.moe import RoutedExperts

Result = TypeVar("Result")
# (the last stage's model chunk, its hidden states [1, T, H], the micro-batch) -> result of the pass.
ForwardOnly = Callable[[GPTModel, Tensor, MicroBatch], Result]
# The same -> (loss to be summed over micro-batches and ranks, tokens of the micro-batch, result to return).
WithLoss = Callable[[GPTModel, Tensor, MicroBatch], tuple[Tensor, int, Result]]


def forward_only(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    function: ForwardOnly[Result],
    routed: RoutedExperts | None = None,
) -> list[Result]:
    """Run all micro-batches through the pipeline in one pass, without gradients, in evaluation mode.

    `routed`: records or replays the experts of the chunks' routers; the caller ends it. Returns the results of
    `function` in micro-batch order on the last stage, [] on other stages.
    """
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            return forward_backward(chunks, micro_batches, function, None, routed)
    finally:
        for chunk in chunks:
            chunk.train()


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    function: Callable[..., Any],
    on_backward: Callable[[MicroBatch], None] | None,
    routed: RoutedExperts | None = None,
) -> list[Any]:  # Megatron's schedules are untyped
    """Run forward and backward of all micro-batches. Megatron reduces and scales the gradients at the end.

    `on_backward` is called on every rank with each micro-batch whose gradient has reached the rank's first chunk.
    `function` is a `WithLoss`; if `on_backward` is None there is no backward pass, and it is a `ForwardOnly`. Returns
    the (third) results of `function` in micro-batch order on the last stage, [] on other stages.
    """
    iterators = [iter(micro_batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=partial(
            _forward_step, function=function, first=chunks[0], on_backward=on_backward, routed=routed
        ),
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        # Megatron requires a value, but with variable_seq_lengths the stages exchange the true shapes.
        seq_length=max(batch.input_ids_1T.shape[1] for batch in micro_batches),
        micro_batch_size=1,
        forward_only=on_backward is None,
        collect_non_loss_data=on_backward is None,
    )


def _forward_step(
    iterator: Iterator[MicroBatch],
    model: torch.nn.Module,
    *,
    function: ForwardOnly[Any],
    first: torch.nn.Module,
    on_backward: Callable[[MicroBatch], None] | None,
    routed: RoutedExperts | None,
) -> tuple[Tensor, Callable[..., object]]:
    """Run one micro-batch through one model chunk, as Megatron's schedules call it.

    `on_backward` is called with the micro-batch once the gradient of chunk `first`'s output is computed. Returns the
    chunk's output, and the function that the schedule calls on the last stage's output.
    """
    batch = next(iterator)
    chunk = unwrap(model)
    arguments: dict[str, Any] = {}
    if chunk.config.bf16:
        arguments["fp32_output"] = False  # the output is hidden states; only log-probs are computed in fp32
    if chunk.config.num_moe_experts:
        arguments["padding_mask"] = _padding_mask(chunk, batch)
    if batch.images is not None and chunk.pre_process:
        arguments["images"] = batch.images
    if routed is not None:
        routed.begin(chunk, batch.routes_TLK)
    output_1TH = model(
        input_ids=batch.input_ids_1T,
        position_ids=batch.position_ids,
        attention_mask=None,
        packed_seq_params=batch.packed_seq_params(),
        **arguments,
    )
    if routed is not None and on_backward is None and batch.routes_TLK is None:
        routed.keep(chunk, batch.input_ids_1T.shape[1])
    if routed is not None and on_backward is not None:
        # Recomputation in backward must use this micro-batch's routes, not those of the last forward pass.
        output_1TH.register_hook(lambda gradient_1TH: routed.begin(chunk, batch.routes_TLK))
    if on_backward is not None and model is first:
        output_1TH.register_hook(lambda gradient_1TH: on_backward(batch))

    def loss_func(hidden_1TH: Tensor, non_loss_data: bool = False) -> object:
        result = function(chunk, hidden_1TH, batch)
        if non_loss_data:
            return result
        loss, tokens, report = result
        return loss, torch.tensor(tokens, dtype=torch.int, device=loss.device), report

    return output_1TH, loss_func


def _padding_mask(chunk: GPTModel, batch: MicroBatch) -> Tensor | None:
    """Return the mask of tokens that routers must not balance, bool [1, rows of this chunk], or None."""
    mask_1T = batch.padding_1T
    if mask_1T is not None and chunk.config.sequence_parallel and not chunk.pre_process:
        # Megatron scatters the mask over the tensor ranks on the first stage only.
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        mask_1T = mask_1T.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return mask_1T
