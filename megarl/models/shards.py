"""This rank's Megatron parameters by canonical name, each with its mapping entry and its place in TP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megarl.models.families import FAMILIES
from megarl.models.info import ModelInfo
from megarl.models.mapping import Entry, canonical_name, expand

# Megatron-Core is imported where a model is there: the converter needs only `table`, and not to wait seconds for it.
if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

TIED_COPY = "output_layer.weight"  # of a tied model's last pipeline stage: a copy of
EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Shard:
    """One parameter of this rank: shard `rank` of `size` in its tensor- or expert-tensor-parallel group."""

    name: str
    parameter: torch.nn.Parameter
    entry: Entry
    rank: int
    size: int
    is_tied_copy: bool = False


def table(info: ModelInfo) -> dict[str, Entry]:
    """Every Megatron parameter of the whole model by canonical name, in layer order."""
    return {entry.megatron: entry for entry in expand(FAMILIES[info.family].rules, info)}


def local_shards(chunks: Sequence[torch.nn.Module], info: ModelInfo, entries: dict[str, Entry]) -> list[Shard]:
    """This rank's parameters, in model order. `chunks` may be wrapped in DDP and Float16Module.

    Raises ValueError listing parameters that no rule covers, that appear twice, or whose shape is not the
    rule's.
    """
    shards: dict[str, Shard] = {}
    wrong: list[str] = []
    for name, parameter in _named_parameters(chunks, info):
        tied = name == TIED_COPY and info.tied
        entry = entries.get(EMBEDDING if tied else name)
        if entry is None or name in shards:
            wrong.append(f"{name}: {'no rule of family ' + info.family if entry is None else 'appears twice'}")
            continue
        rank, size = tensor_place(entry)
        expected = entry.shard_shape(rank, size)
        if tuple(parameter.shape) != expected:
            wrong.append(f"{name}: the model has shape {tuple(parameter.shape)}, the rule {expected}")
            continue
        shards[name] = Shard(name, parameter, entry, rank, size, tied)
    if wrong:
        raise ValueError("Megatron parameters that the mapping does not cover:\n  " + "\n  ".join(wrong))
    return list(shards.values())


def tensor_place(entry: Entry) -> tuple[int, int]:
    """(rank, size) in the group that shards `entry`: expert-tensor parallel for experts, else TP."""
    from megatron.core import parallel_state

    if entry.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DDP and Float16Module."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    while not isinstance(chunk, GPTModel):
        chunk = chunk.module
    return chunk


def _named_parameters(chunks: Sequence[torch.nn.Module], info: ModelInfo) -> Iterator[tuple[str, torch.nn.Parameter]]:
    from megatron.core import parallel_state

    experts = (info.num_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * experts
    for chunk in map(unwrap, chunks):
        layers = {i: layer.layer_number - 1 for i, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            yield canonical_name(name, layers, first_expert), parameter
