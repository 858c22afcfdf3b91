"""Hugging Face ↔ Megatron, declared once and used in both directions.

A `Rule` says which Hugging Face tensors one Megatron parameter is made of, as a concatenation of slices along
one axis, and how tensor parallelism cuts it. Everything else follows: a rank's shard is a list of `Piece`s,
loading copies pieces from files into the shard, exporting copies them back, and a layout of one rank gives
the full tensor (what a converter needs). No rule moves a single value, so round trips are exact; whether the
rule is right, the log-probs against `transformers` decide.

Megatron names are canonical: the local (not Transformer Engine) spec's, with global layer and expert numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.models.info import ModelInfo

Where = Literal["model", "layer", "dense_layer", "moe_layer"]


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) along the rule's axis of Hugging Face tensor `source`; None = zero padding."""

    source: int | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: name template and shape in symbols of `ModelInfo.dims`, e.g. "q hidden"."""

    name: str
    shape: str


# The full Megatron tensor as pieces of its sources along the axis.
Arrange = Callable[[ModelInfo], list[Piece]]


@dataclass(frozen=True)
class Rule:
    """One Megatron parameter (per layer, per expert) and where it comes from.

    `axis`: the tensor-parallel axis; None = replicated. `arrange`: order of the sources' slices in the full
    tensor; default: one source after the other. `per_source`: each rank holds its chunk of every source (gate
    and up), instead of a chunk of the concatenation. `pad_to_tp`: zero rows make the axis divisible
    (vocabulary). `buffer`: a persistent fp32 buffer instead of a parameter; it stays fp32 in every precision.
    """

    megatron: str
    sources: tuple[Source, ...]
    axis: int | None = None
    where: Where = "model"
    arrange: Arrange | None = None
    per_source: bool = False
    pad_to_tp: bool = False
    buffer: bool = False
    when: Callable[[ModelInfo], bool] = lambda info: True


@dataclass(frozen=True)
class Entry:
    """A rule applied: one Megatron parameter and its Hugging Face tensors' `names` and full `shapes`."""

    megatron: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rule: Rule
    info: ModelInfo
    expert: int | None = None
    layer: int | None = None

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """The shard of tensor-parallel rank `rank` of `size`, in order along `rule.axis` (or 0)."""
        full = self._full(size)
        if self.rule.axis is None:
            return full
        if self.rule.per_source:
            return [_chunk(piece, rank, size, self.megatron) for piece in full]
        total = sum(piece.size for piece in full)
        if total % size:
            raise ValueError(f"{self.megatron}: {total} rows do not divide by tensor-parallel size {size}")
        return cut(full, rank * total // size, (rank + 1) * total // size)

    def shard_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Shape of that rank's Megatron parameter."""
        shape = list(self.shapes[0])
        shape[self.rule.axis or 0] = sum(piece.size for piece in self.pieces(rank, size))
        return tuple(shape)

    def _full(self, size: int) -> list[Piece]:
        axis = self.rule.axis or 0
        if self.rule.arrange is not None:
            return self.rule.arrange(self.info)
        pieces = [Piece(i, 0, shape[axis]) for i, shape in enumerate(self.shapes)]
        missing = -sum(piece.size for piece in pieces) % size if self.rule.pad_to_tp else 0
        return [*pieces, Piece(None, 0, missing)] if missing else pieces


def expand(rules: tuple[Rule, ...], info: ModelInfo) -> Iterator[Entry]:
    """All Megatron parameters of the model in layer order: embedding, layers, final norm, output layer.

    The table lists the rules before the layers, those of a layer, and those after them in that order.
    """
    rules = tuple(rule for rule in rules if rule.when(info))
    first = next(i for i, rule in enumerate(rules) if rule.where != "model")
    for rule in rules[:first]:
        yield _entry(rule, info)
    for layer in range(info.num_layers):
        for rule in rules:
            if rule.where == "model" or rule.where == ("dense_layer" if info.is_moe_layer(layer) else "moe_layer"):
                continue
            if "{expert}" in rule.megatron:
                continue
            yield _entry(rule, info, layer)
        if info.is_moe_layer(layer):
            for expert in range(info.num_experts or 0):
                for rule in rules:
                    if rule.where == "moe_layer" and "{expert}" in rule.megatron:
                        yield _entry(rule, info, layer, expert)
    for rule in rules[first:]:
        if rule.where == "model":
            yield _entry(rule, info)


def qkv(info: ModelInfo) -> list[Piece]:
    """Megatron's fused QKV, group by group: the group's query heads, its key head, its value head."""
    per_group, d = info.heads // info.kv_heads * info.head_dim, info.head_dim
    return [
        piece
        for g in range(info.kv_heads)
        for piece in (
            Piece(0, g * per_group, (g + 1) * per_group),
            Piece(1, g * d, (g + 1) * d),
            Piece(2, g * d, (g + 1) * d),
        )
    ]


_TE_NAMES = (
    (
        re.compile(r"(layers\.\d+)\.self_attention\.linear_qkv\.layer_norm_weight$"),
        r"\1.input_layernorm.weight",
    ),
    (re.compile(r"(layers\.\d+)\.mlp\.linear_fc1\.layer_norm_weight$"), r"\1.pre_mlp_layernorm.weight"),
    (
        re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$"),
        r".mlp.experts.local_experts.\2.\1.weight",
    ),
)


def canonical_name(name: str, layers: dict[int, int], first_expert: int) -> str:
    """The canonical name of a rank's parameter.

    `layers`: global layer of each rank-local layer index; `first_expert`: global number of local expert 0.
    """
    for pattern, replacement in _TE_NAMES:
        name = pattern.sub(replacement, name)
    name = re.sub(r"^(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{layers[int(m[2])]}", name)
    return re.sub(r"(\.local_experts\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + first_expert}", name)


def _entry(rule: Rule, info: ModelInfo, layer: int | None = None, expert: int | None = None) -> Entry:
    numbers = {"layer": layer, "expert": expert}
    dims = info.dims
    return Entry(
        megatron=rule.megatron.format(**numbers),
        names=tuple(source.name.format(**numbers) for source in rule.sources),
        shapes=tuple(tuple(dims[symbol] for symbol in source.shape.split()) for source in rule.sources),
        rule=rule,
        info=info,
        expert=expert,
        layer=layer,
    )


def _chunk(piece: Piece, rank: int, size: int, name: str) -> Piece:
    if piece.size % size:
        raise ValueError(f"{name}: {piece.size} rows do not divide by tensor-parallel size {size}")
    step = piece.size // size
    return Piece(piece.source, piece.start + rank * step, piece.start + (rank + 1) * step)


def cut(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """Rows [start, stop) of the concatenation of `pieces`; neighbours of one source become one piece."""
    result: list[Piece] = []
    offset = 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(stop - offset, piece.size)
        if low < high:
            result.append(Piece(piece.source, piece.start + low, piece.start + high))
        offset += piece.size
    return result
