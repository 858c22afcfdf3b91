"""Log-probs of the response tokens from the hidden states of the last pipeline stage.

GPTModel projects onto the vocabulary itself and returns all logits. Here its output layer returns its input, the hidden
states, and `logprobs.linear_token_logprobs` projects only the rows that predict a response token, in chunks.

Shapes: T tokens of a micro-batch (T / TP under sequence parallelism), R response tokens, H hidden size.
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megarl.trainer.batch import MicroBatch
from megarl.trainer.logprobs import linear_token_logprobs


def return_hidden_states(chunk: GPTModel) -> None:
    """Make `chunk.forward` return the final hidden states [1, T or T / TP, H] instead of logits (last stage only).

    The output layer is still called as a module, so DDP's hooks on its weight run.

    Raises:
        ValueError: Megatron's option `defer_embedding_wgrad_compute` is on.
    """
    if not chunk.post_process:
        return
    if chunk.config.defer_embedding_wgrad_compute:
        raise ValueError("megatron.transformer.defer_embedding_wgrad_compute is not supported; remove it")

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

    `chunk`: the model chunk of the last stage; `chunk_rows`: rows per chunk of logits; `temperature` and `compiled`: as
    in `linear_token_logprobs`. The results are equal on all tensor ranks.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    hidden_TH = hidden_1TH[0]
    if chunk.config.sequence_parallel:
        hidden_RH = gather_from_sequence_parallel_region(hidden_TH, group=group).index_select(0, batch.rows_R)
    else:
        hidden_RH = copy_to_tensor_model_parallel_region(hidden_TH.index_select(0, batch.rows_R), group=group)
    return linear_token_logprobs(
        hidden_RH,
        output_weight(chunk),
        batch.targets_R,
        temperature=temperature,
        vocab_size=vocab_size,
        chunk=chunk_rows,
        group=group,
        with_entropy=with_entropy,
        compiled=compiled,
    )


def output_weight(chunk: GPTModel) -> torch.nn.Parameter:
    """Return this rank's rows of the output projection, [padded vocabulary / TP, H]."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight
