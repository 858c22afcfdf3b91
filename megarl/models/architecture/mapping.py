"""The mapping between Hugging Face and Megatron tensors, declared once and used in both directions.

A `Rule` describes one Megatron parameter as a concatenation of slices of Hugging Face tensors along one axis, and says
how tensor parallelism cuts it. A rank's shard is then a list of `Piece`s: loading copies them from files into the
shard, and exporting copies them back. The converter uses the layout of one rank, whose shards are full tensors. Rules
only copy values, so round trips are exact. Whether a rule is right is tested by comparing log-probs with
`transformers`.

Megatron names are canonical: the local layer spec's (not Transformer Engine's), with global layer and expert numbers.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megarl.models.architecture.architecture import ModelInfo

RuleScope = Literal["model", "layer", "dense_layer", "moe_layer", "attention_layer", "delta_layer"]
GATE_UP = ("_w", "_v")  # Megatron-Core's suffixes of checkpoint keys for the two halves of a gated linear_fc1


@dataclass(frozen=True)
class Piece:
    """Rows [start, stop) along the rule's axis of the Hugging Face tensor with index `source`; None = zero padding."""

    source: int | None
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Source:
    """A Hugging Face tensor: its name template, and its shape in symbols of `ModelInfo.dims`, e.g. "q hidden"."""

    name: str
    shape: str


# Returns the full Megatron tensor as pieces of its sources along the axis.
Arrange = Callable[[ModelInfo], list[Piece]]


@dataclass(frozen=True)
class Rule:
    """A Megatron parameter (one per layer, one per expert) and the Hugging Face tensors that it consists of.

    `axis`: the axis that tensor parallelism cuts; None = replicated. `where`: one parameter per model, or one per layer
    of this kind. `arrange`: the order of the sources' slices in the full tensor; default: one source after the other.
    `per_source`: each source (gate and up) is cut separately. `sections`: row counts of parts to cut separately, by the
    suffix of their checkpoint keys. `pad_to_tp`: zero rows make the axis divisible (vocabulary). `buffer`: a persistent
    buffer instead of a parameter. `fp32`: stays fp32 in every precision, as each buffer does. `when`: whether a model
    has the parameter.
    """

    megatron: str
    sources: tuple[Source, ...]
    axis: int | None = None
    where: RuleScope = "model"
    arrange: Arrange | None = None
    per_source: bool = False
    sections: Callable[[ModelInfo], Mapping[str, int]] | None = None
    pad_to_tp: bool = False
    buffer: bool = False
    fp32: bool = False
    when: Callable[[ModelInfo], bool] = lambda info: True

    @property
    def stays_fp32(self) -> bool:
        """True if it is fp32 in checkpoints, exports and weight sync, whatever the precision."""
        return self.buffer or self.fp32


@dataclass(frozen=True)
class Entry:
    """A rule applied to one layer and expert: a Megatron parameter, and `names` and full `shapes` of its sources."""

    megatron: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    rule: Rule
    info: ModelInfo
    expert: int | None = None
    layer: int | None = None

    def pieces(self, rank: int, size: int) -> list[Piece]:
        """Return the shard of tensor-parallel rank `rank` of `size`, in order along `rule.axis` (or axis 0).

        Raises ValueError if the rows are not divisible by `size`.
        """
        full = self._full(size)
        if self.rule.axis is None:
            return full
        held: list[Piece] = []
        begin = 0
        for rows in self.sections.values() or [sum(piece.size for piece in full)]:
            if rows % size:
                raise ValueError(f"{self.megatron}: {rows} rows are not divisible by tensor-parallel size {size}")
            held += cut(full, begin + rank * rows // size, begin + (rank + 1) * rows // size)
            begin += rows
        return held

    @property
    def sections(self) -> Mapping[str, int]:
        """Rows of each part of the full parameter that is cut separately, by key suffix; {} if it is one part."""
        if self.rule.sections is not None:
            return self.rule.sections(self.info)
        axis = self.rule.axis or 0
        sizes = (shape[axis] for shape in self.shapes)
        return dict(zip(GATE_UP, sizes, strict=True)) if self.rule.per_source else {}

    def shard_shape(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the shape of the Megatron parameter on that rank."""
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
    """Yield all Megatron parameters of the model in layer order: embedding, layers, final norm, output layer.

    `rules` must be in this order: first those before the layers, then those of a layer, then those after the layers.
    """
    rules = tuple(rule for rule in rules if rule.when(info))
    first = next(i for i, rule in enumerate(rules) if rule.where != "model")
    for rule in rules[:first]:
        yield _entry(rule, info)
    for layer in range(info.num_layers):
        for rule in rules:
            if _is_of(rule.where, info, layer) and "{expert}" not in rule.megatron:
                yield _entry(rule, info, layer)
        if info.is_moe_layer(layer):
            for expert in range(info.num_experts or 0):
                for rule in rules:
                    if rule.where == "moe_layer" and "{expert}" in rule.megatron:
                        yield _entry(rule, info, layer, expert)
    for rule in rules[first:]:
        if rule.where == "model":
            yield _entry(rule, info)


def _is_of(where: RuleScope, info: ModelInfo, layer: int) -> bool:
    """Return whether a rule with this scope applies to this layer."""
    mlp = "moe_layer" if info.is_moe_layer(layer) else "dense_layer"
    return where in ("layer", mlp, "delta_layer" if info.is_delta_layer(layer) else "attention_layer")


def qkv(info: ModelInfo) -> list[Piece]:
    """Return Megatron's fused QKV: query heads, key head and value head of each group."""
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


def gated_qkv(info: ModelInfo) -> list[Piece]:
    """Return Megatron's fused QKV with gates: query heads, their gates, key head and value head of each group.

    In the query source each head is followed by its gate.
    """
    heads, d = info.heads // info.kv_heads, info.head_dim
    return [
        piece
        for g in range(info.kv_heads)
        for piece in (
            *(Piece(0, 2 * head * d, (2 * head + 1) * d) for head in range(g * heads, (g + 1) * heads)),
            *(Piece(0, (2 * head + 1) * d, (2 * head + 2) * d) for head in range(g * heads, (g + 1) * heads)),
            Piece(1, g * d, (g + 1) * d),
            Piece(2, g * d, (g + 1) * d),
        )
    ]


# A norm's canonical name in its layer, and the projection into which Transformer Engine fuses it, if the model has it.
FUSED_NORMS = (
    ("input_layernorm.weight", "self_attention.linear_qkv"),
    ("input_layernorm.weight", "self_attention.in_proj"),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1"),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj"),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj"),
)
_GROUPED_EXPERT = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")


def canonical_name(name: str, layers: dict[int, int], first_expert: int) -> str:
    """Return the canonical name of a rank's parameter.

    `layers`: the global layer of each rank-local layer index; `first_expert`: the global number of local expert 0.
    """
    for norm, linear in FUSED_NORMS:
        name = re.sub(rf"^(decoder\.layers\.\d+\.){re.escape(linear)}\.layer_norm_weight$", rf"\g<1>{norm}", name)
    name = _GROUPED_EXPERT.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
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


def cut(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """Return rows [start, stop) of the concatenation of `pieces`, as pieces."""
    result: list[Piece] = []
    offset = 0
    for piece in pieces:
        low, high = max(start - offset, 0), min(stop - offset, piece.size)
        if low < high:
            result.append(Piece(piece.source, piece.start + low, piece.start + high))
        offset += piece.size
    return result
