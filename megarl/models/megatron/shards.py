"""This rank's Megatron parameters and buffers by canonical name, with mapping entries and tensor-parallel ranks.

Tensors may have any shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from megarl.models.architecture.architecture import ModelInfo
from megarl.models.architecture.mapping import Entry, canonical_name, expand
from megarl.models.families import FAMILIES

# Importing Megatron-Core takes seconds, and the converter needs only `table`: it is imported where a model exists.
if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

EMBEDDING = "embedding.word_embeddings.weight"
FIRST_STAGE = ("embedding.", "visual.")  # of the first pipeline stage, in addition to its layers
TIED_COPY = "output_layer.weight"  # in the last pipeline stage of a tied model, a copy of EMBEDDING


@dataclass(frozen=True)
class Shard:
    """A parameter of this rank: shard `rank` of `size` in its tensor- or expert-tensor-parallel group.

    `parameter` is a plain tensor where the rule has `buffer`.
    """

    name: str
    parameter: torch.Tensor
    entry: Entry
    rank: int
    size: int
    is_tied_copy: bool = False


def table(info: ModelInfo) -> dict[str, Entry]:
    """Return every Megatron parameter and mapped buffer of the whole model by canonical name, in layer order.

    A tied model has no entry for the output layer. Raises ValueError naming a Megatron parameter or a Hugging Face
    tensor that the family's rules map twice.
    """
    entries: dict[str, Entry] = {}
    readers: dict[str, str] = {}  # Hugging Face name -> the Megatron name made of it
    for entry in expand(FAMILIES[info.family].rules_of(info), info):
        if entry.megatron in entries:
            raise ValueError(f"family {info.family}: two rules make {entry.megatron}")
        entries[entry.megatron] = entry
        for name in entry.names:
            if name in readers:
                both = f"{readers[name]} and {entry.megatron}" if readers[name] != entry.megatron else entry.megatron
                raise ValueError(f"family {info.family}: {name} is mapped twice, in {both}")
            readers[name] = entry.megatron
    return entries


def local_shards(chunks: Sequence[torch.nn.Module], info: ModelInfo, entries: dict[str, Entry]) -> list[Shard]:
    """Return this rank's parameters and persistent buffers, in model order.

    `chunks` may be wrapped (DDP, Float16Module). Raises ValueError that lists tensors without a rule, twice or of
    another shape than the rule's, and entries of this rank's layers and experts that the model lacks.
    """
    shards: dict[str, Shard] = {}
    wrong: list[str] = []
    place = _Place.of(chunks, info)
    for name, parameter in _named_tensors(chunks, place):
        tied = name == TIED_COPY and info.tied
        entry = entries.get(EMBEDDING if tied else name)
        if entry is None or name in shards:
            wrong.append(f"{name}: {'no rule of family ' + info.family if entry is None else 'appears twice'}")
            continue
        if entry.rule.buffer == isinstance(parameter, torch.nn.Parameter):
            wrong.append(f"{name}: the rule says {'buffer' if entry.rule.buffer else 'parameter'}, the model differs")
            continue
        rank, size = tensor_place(entry)
        expected = entry.shard_shape(rank, size)
        if tuple(parameter.shape) != expected:
            wrong.append(f"{name}: the model has shape {tuple(parameter.shape)}, the rule {expected}")
            continue
        shards[name] = Shard(name, parameter, entry, rank, size, tied)
    absent = [name for name, entry in entries.items() if place.holds(entry) and name not in shards]
    wrong += [f"{name}: the model does not have it" for name in absent]
    if wrong:
        raise ValueError("Megatron parameters that the mapping does not cover:\n  " + "\n  ".join(wrong))
    return list(shards.values())


def tensor_place(entry: Entry) -> tuple[int, int]:
    """Return (rank, size) in the group that shards `entry`: tensor parallel, or expert-tensor parallel for experts."""
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
    """Return the GPTModel inside DDP and Float16Module."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    while not isinstance(chunk, GPTModel):
        chunk = cast("torch.nn.Module", chunk.module)
    return chunk


@dataclass(frozen=True)
class _Place:
    """The part of the model that this rank holds. `layers`: per chunk, the global layer of each local layer."""

    layers: tuple[dict[int, int], ...]
    experts: range
    first: bool  # holds the embedding and the vision tower
    last: bool  # holds the final norm and the output layer

    @classmethod
    def of(cls, chunks: Sequence[torch.nn.Module], info: ModelInfo) -> _Place:
        from megatron.core import parallel_state

        models = [unwrap(chunk) for chunk in chunks]
        count = (info.num_experts or 0) // parallel_state.get_expert_model_parallel_world_size()
        start = parallel_state.get_expert_model_parallel_rank() * count
        return cls(
            layers=tuple({i: layer.layer_number - 1 for i, layer in enumerate(m.decoder.layers)} for m in models),
            experts=range(start, start + count),
            first=any(model.pre_process for model in models),
            last=any(model.post_process for model in models),
        )

    def holds(self, entry: Entry) -> bool:
        if entry.layer is None:
            return self.first if entry.megatron.startswith(FIRST_STAGE) else self.last
        mine = any(entry.layer in layers.values() for layers in self.layers)
        return mine and (entry.expert is None or entry.expert in self.experts)


def _named_tensors(chunks: Sequence[torch.nn.Module], place: _Place) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk, layers in zip(map(unwrap, chunks), place.layers, strict=True):
        for name, tensor in (*chunk.named_parameters(), *persistent_buffers(chunk)):
            yield canonical_name(name, layers, place.experts.start), tensor


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor of each buffer in the model's state dict (`register_buffer(persistent=True)`)."""
    for prefix, each in module.named_modules():
        for name, buffer in each.named_buffers(recurse=False):
            if name not in each._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
