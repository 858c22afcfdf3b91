"""The last stage's output: hidden states of chosen rows -> log-probs of the response tokens.

GPTModel projects onto the vocabulary itself and returns all logits. Here its output layer hands the hidden states
through instead, and `logprobs.linear_token_logprobs` projects only the rows that predict a response token, in chunks.
"""

from __future__ import annotations

from typing import Any

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
    """Make `chunk.forward` return final hidden states [1, T or T/TP, H] instead of logits (last stage only).

    The output layer stays a module that is called, so DDP's hooks on its weight still fire.
    """
    if not chunk.post_process:
        return
    if chunk.config.defer_embedding_wgrad_compute:
        raise ValueError("megatron.transformer.defer_embedding_wgrad_compute is not supported; remove it")

    def forward(input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return input_, None

    chunk.output_layer.forward = forward


def response_logprobs(
    chunk: GPTModel,
    hidden_1TH: Tensor,
    batch: MicroBatch,
    *,
    temperature: float,
    vocab_size: int,
    chunk_rows: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies, fp32 [R], of the response tokens of `batch`; equal on all tensor ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    hidden_TH = hidden_1TH[0]
    if chunk.config.sequence_parallel:
        hidden_RH = gather_from_sequence_parallel_region(hidden_TH, group=group).index_select(0, batch.rows)
    else:
        hidden_RH = copy_to_tensor_model_parallel_region(hidden_TH.index_select(0, batch.rows), group=group)
    return linear_token_logprobs(
        hidden_RH,
        output_weight(chunk),
        batch.targets,
        temperature=temperature,
        vocab_size=vocab_size,
        chunk=chunk_rows,
        group=group,
        with_entropy=with_entropy,
    )


def output_weight(chunk: GPTModel) -> torch.nn.Parameter:
    """This rank's rows of the output projection, [padded vocabulary / TP, H]."""
    if chunk.share_embeddings_and_output_weights:
        return chunk.shared_embedding_or_output_weight()
    return chunk.output_layer.weight
