"""Packed micro-batches of samples: sequences laid end to end (THD), without padding inside or between them.

With context parallelism each sequence is padded to chunks of equal length, of which each rank holds two (`zigzag`).

Shapes: P tokens of a micro-batch (prompts, responses and padding), T those of this context-parallel rank (all without
context parallelism), R response tokens, O those that this rank predicts, S sequences, L MoE layers of this rank, K
experts per token. Only the O rows that predict a response token are projected onto the vocabulary. Cumulative lengths
keep Megatron-Core's name `cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.algorithms.objective.objective import WEIGHT_STREAMS
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes, RoutesSpec
from megarl.queue.streams import ADVANTAGES, CE_WEIGHTS, STREAMS, Stream
from megarl.queue.trajectory import Trajectory
from megarl.trainer.packing import chunk_count, padded

if TYPE_CHECKING:
    from megarl.models.megatron.vision_model import ImageBatch
    from megarl.trainer.packed_images import ImagePacker


@dataclass
class TrainSample:
    """A prompt and its response, as one replica trains it. Tensors are on the CPU; all but `routes_TLK` are [R].

    `loss_mask_R` (bool; None = all) marks trained response tokens. `streams`: values per response token, by the names
    in `megarl.queue.streams`; log-probs are fp32, at the sampling temperature. `temperature`: None = the run's; set if
    data sets differ. `images`: in the order of the tokens of prompt and response. `routes_TLK`: small integers, the
    experts that the routers replay for each token of prompt and response; None: they choose.
    """

    key: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask_R: Tensor | None = None
    streams: dict[str, Tensor] = field(default_factory=dict)
    temperature: float | None = None
    images: tuple[ImageRef, ...] = ()
    routes_TLK: Tensor | None = None

    @classmethod
    def of(cls, row: Trajectory, *, trained: bool = True, temperature: float | None = None) -> TrainSample:
        """Return the sample of a trajectory, with its streams. `trained=False` excludes its tokens from every term."""
        sample = cls(
            key=row.key,
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            loss_mask_R=torch.tensor(row.response_mask, dtype=torch.bool) & trained,
            streams={
                name: torch.tensor(list(values), dtype=getattr(torch, STREAMS[name].dtype))
                for name, values in row.streams.items()
            },
            temperature=temperature,
            images=row.images,
        )
        if not trained and CE_WEIGHTS in sample.streams:  # these weights apply even where the mask is False
            sample.streams[CE_WEIGHTS] = torch.zeros(len(row.response_ids))
        return sample

    @property
    def length(self) -> int:
        """The number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def image_tokens(self) -> int:
        """The number of image tokens."""
        return sum(image.tokens for image in self.images)

    @property
    def trained_tokens(self) -> int:
        """The number of response tokens in the loss."""
        return len(self.response_ids) if self.loss_mask_R is None else int(self.loss_mask_R.sum())

    @property
    def trained_mask(self) -> Tensor:
        """The trained tokens, bool [R]."""
        if self.loss_mask_R is None:
            return torch.ones(len(self.response_ids), dtype=torch.bool)
        return self.loss_mask_R.bool()

    def set_advantage(self, advantage: float) -> None:
        """Give every response token the same advantage."""
        self.streams[ADVANTAGES] = torch.full((len(self.response_ids),), advantage)

    def set_turn_advantages(self, advantages: Sequence[float], starts: Sequence[int]) -> None:
        """Give the response tokens of each turn of the model the turn's advantage.

        `starts`: the first token of each turn. Tokens inserted after a turn get its advantage too, but are not trained.
        """
        ends = [*starts[1:], len(self.response_ids)]
        first = 0  # tokens before the first turn were not sampled
        parts = []
        for value, end in zip(advantages, ends, strict=True):
            parts.append(torch.full((end - first,), value))
            first = end
        self.streams[ADVANTAGES] = torch.cat(parts)


@dataclass(frozen=True)
class MicroBatch:
    """The input of one packed forward (and backward) pass.

    An empty micro-batch is one dummy sequence: it takes part in every collective, its only row is masked, and `tokens`
    is 0. With sequence parallelism another dummy sequence pads T to a multiple of TP. With context parallelism padding
    follows each sequence, which does not attend to it. Padding affects neither the loss nor the routers' balancing.
    """

    input_ids_1T: Tensor  # int64
    position_ids: Tensor  # int64, from 0 in each sequence: [1, T]; of a vision-language model [3, 1, P]
    cu_seqlens: Tensor  # int32 [S + 1] over P
    max_seqlen: int  # over P; were it the length of P, Megatron's RoPE would let positions run on across sequences
    rows_O: Tensor  # int64: the row of T that predicts each response token of `own_O`
    own_O: Tensor | None  # int64: the response tokens that this rank predicts; None: all
    targets_R: Tensor  # int64: the response tokens
    response_cu_seqlens: Tensor  # int32 [S + 1] over R; a dummy sequence that pads T has no rows
    mask_R: Tensor  # bool: trained tokens
    streams: dict[str, Tensor]  # [R] each, by name: those that the samples of all replicas have (`agreed_streams`)
    samples: tuple[int, ...]  # indices of the samples, in packing order
    keys: tuple[str, ...]  # their keys, in the same order
    tokens: int  # T without padding; weights Megatron's auxiliary losses
    padding_1T: Tensor | None = None  # bool: True = padding; None on all ranks if there is none
    temperature_R: Tensor | None = None  # fp32, per response token; None: the run's
    images: ImageBatch | None = None
    routes_TLK: Tensor | None = None  # the experts that the routers replay for each token; None: they choose

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to train on: the only sequence is the dummy."""
        return not self.samples

    def packed_seq_params(self) -> PackedSeqParams:
        """Return Megatron's description of the packing."""
        # With context parallelism Transformer Engine needs both kinds of bounds. Padding belongs to its sequence.
        bounds = None if self.own_O is None else self.cu_seqlens
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch with all tensors on `device`."""
        moved = {
            each.name: value.to(device, non_blocking=True)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), Tensor)
        }
        streams = {name: value.to(device, non_blocking=True) for name, value in self.streams.items()}
        images = None if self.images is None else self.images.to(device)
        return replace(self, **moved, streams=streams, images=images)  # type: ignore[arg-type]


def check_samples(samples: Sequence[TrainSample], vocab_size: int, *, sees: bool = False) -> None:
    """Raise ValueError naming the sample if its tokens, streams or mask are wrong. `sees`: the model takes images."""
    for sample in samples:
        if not sample.prompt_ids or not sample.response_ids:
            raise ValueError(f"sample {sample.key}: prompt and response need at least one token each")
        tokens = sample.prompt_ids + sample.response_ids
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise ValueError(f"sample {sample.key}: a token id is outside the vocabulary of {vocab_size}")
        if sample.images and not sees:
            raise ValueError(f"sample {sample.key}: it has images, and the model reads text only")
        if sample.images and sample.images[-1].end > sample.length:
            raise ValueError(f"sample {sample.key}: its last image ends behind its {sample.length} tokens")
        for name, value in [("loss_mask", sample.loss_mask_R), *sample.streams.items()]:
            if value is not None and value.shape != (len(sample.response_ids),):
                raise ValueError(
                    f"sample {sample.key}: {name} has shape {tuple(value.shape)}, "
                    f"but the response has {len(sample.response_ids)} tokens"
                )
        for name in WEIGHT_STREAMS:
            if name in sample.streams and not bool(sample.streams[name].isfinite().all()):
                raise ValueError(f"sample {sample.key}: a value of {name} is not finite")


def check_routes(samples: Sequence[TrainSample], spec: RoutesSpec) -> None:
    """Raise ValueError naming the sample unless each has experts of this `spec` to replay."""
    for sample in samples:
        routes = None if sample.routes_TLK is None else Routes(sample.routes_TLK.numpy())
        if problem := spec.problem(routes, sample.length):
            raise ValueError(f"sample {sample.key}: {problem} (trainer.router_replay)")


def common_streams(samples: Sequence[TrainSample]) -> list[str]:
    """Return the names of the streams that all samples have, and of optional ones that any has, sorted."""
    return agreed_streams(sample.streams for sample in samples)


def agreed_streams(found: Iterable[Iterable[str]]) -> list[str]:
    """Return the names that all of `found` have, and those of optional streams that any has, sorted."""
    sets = [set(names) for names in found]
    optional = {name for names in sets for name in names if STREAMS[name].optional}
    return sorted(set.intersection(*sets) | optional) if sets else []


def zigzag(cu_seqlens: Tensor, rank: int, size: int) -> Tensor:
    """Return the rows of P that context-parallel rank `rank` of `size` holds, int64 [T], in its order.

    Each sequence is cut into 2 x `size` chunks. Rank r holds the r-th from the front and the r-th from the back, so all
    ranks attend to equally many keys. `cu_seqlens`: over P.
    """
    rows_P = torch.arange(int(cu_seqlens[-1]))
    if size == 1:
        return rows_P
    chunks = [rows_P[start:stop].chunk(2 * size) for start, stop in pairwise(cu_seqlens.tolist())]
    return torch.cat([each[index] for each in chunks for index in (rank, 2 * size - 1 - rank)])


def unzigzag(parts: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    """Return the rows of P in order. `parts`: each context-parallel rank's rows, as `zigzag` orders them."""
    whole = torch.cat(list(parts))
    rows_P = torch.cat([zigzag(cu_seqlens, rank, len(parts)) for rank in range(len(parts))])
    return torch.empty_like(whole).index_copy_(0, rows_P.to(whole.device), whole)


def pack(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    align: int = 1,
    streams: Sequence[str] | None = None,
    packer: ImagePacker | None = None,
    context: tuple[int, int] = (0, 1),
) -> MicroBatch:
    """Lay `samples[i] for i in indices` end to end, T padded to a multiple of `align` (TP under sequence parallelism).

    `streams`: names of the streams to pack, which all samples must have unless they are optional; None:
    `common_streams`. `packer`: of a vision-language model. `context`: rank and size of context parallelism. Raises
    ValueError for images outside their sample.
    """
    names = common_streams(samples) if streams is None else streams
    chosen = [samples[index] for index in indices]
    images = [sample.images for sample in chosen]
    rank, size = context
    all_lengths = [padded(sample.length, size) for sample in chosen]
    multiple = lcm(align * size, chunk_count(size))
    if dummy := -sum(all_lengths) % multiple if chosen else multiple:
        all_lengths.append(dummy)
    starts = _cumulative(all_lengths)
    # An empty micro-batch keeps one masked row, so that backward reaches every stage and parameter.
    responses = [len(sample.response_ids) for sample in chosen] or [1]
    targets = [token for sample in chosen for token in sample.response_ids] or [0]
    prompts = [len(sample.prompt_ids) for sample in chosen] or [1]
    # Row (start + prompt - 1 + j) predicts response token j.
    firsts = [start + prompt - 1 for start, prompt in zip(starts.tolist(), prompts, strict=False)]
    predicting_R = torch.cat([torch.arange(count) + row for row, count in zip(firsts, responses, strict=True)])
    ids_P, padding_P = torch.zeros(sum(all_lengths), dtype=torch.int64), torch.ones(sum(all_lengths), dtype=torch.bool)
    for sample, start in zip(chosen, starts.tolist(), strict=False):
        ids_P[start : start + sample.length] = torch.tensor([*sample.prompt_ids, *sample.response_ids])
        padding_P[start : start + sample.length] = False
    rows_T = zigzag(starts, rank, size)
    places_P = torch.full_like(ids_P, -1)
    places_P[rows_T] = torch.arange(len(rows_T))  # index in T of each row of P; -1: on another rank
    rows_R = places_P[predicting_R]
    own_O = (rows_R >= 0).nonzero()[:, 0]
    padding_T = padding_P[rows_T]
    return MicroBatch(
        input_ids_1T=ids_P[rows_T][None],
        position_ids=torch.cat([torch.arange(length) for length in all_lengths])[rows_T][None]
        if packer is None
        else packer.positions([*zip(all_lengths, images, strict=False)], dummy),
        cu_seqlens=starts,
        max_seqlen=max(all_lengths),
        rows_O=rows_R[own_O],
        own_O=None if size == 1 else own_O,
        targets_R=torch.tensor(targets),
        response_cu_seqlens=_cumulative(responses),
        mask_R=torch.cat([sample.trained_mask for sample in chosen]) if chosen else torch.zeros(1, dtype=torch.bool),
        streams={name: _joined(chosen, STREAMS[name]) for name in names},
        samples=tuple(indices),
        keys=tuple(sample.key for sample in chosen),
        tokens=int((~padding_T).sum()),
        padding_1T=padding_T[None] if bool(padding_P.any()) else None,
        temperature_R=_temperatures(chosen),
        images=packer.pack(images, starts.tolist(), places_P) if packer is not None else None,
        routes_TLK=_routes(chosen, starts.tolist(), rows_T),
    )


def _routes(chosen: Sequence[TrainSample], starts: Sequence[int], rows_T: Tensor) -> Tensor | None:
    """Return the experts of the tokens of `rows_T`; None unless samples have some. `starts`: of sequences, then P.

    Padding goes to experts 0..K-1: Megatron needs K different ones.
    """
    given = [(start, sample.routes_TLK) for start, sample in zip(starts, chosen, strict=False)]
    parts = [(start, part_TLK) for start, part_TLK in given if part_TLK is not None]
    if not parts:
        return None
    _, layers, topk = parts[0][1].shape
    routes_PLK = torch.arange(topk, dtype=parts[0][1].dtype).repeat(starts[-1], layers, 1)
    for start, part_TLK in parts:
        routes_PLK[start : start + len(part_TLK)] = part_TLK
    return routes_PLK[rows_T]


def unpack(values_R: Tensor, samples: Sequence[TrainSample], indices: Sequence[int]) -> list[Tensor]:
    """Cut packed response values into one tensor per sample of `indices`; return [] for an empty micro-batch."""
    if not indices:
        return []
    return list(values_R.split([len(samples[index].response_ids) for index in indices]))


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _temperatures(chosen: Sequence[TrainSample]) -> Tensor | None:
    """Return the temperature of each response token, [R]; None if no sample has one. ValueError if only some do."""
    own = [sample.temperature for sample in chosen if sample.temperature is not None]
    if own and len(own) < len(chosen):
        raise ValueError(f"{len(own)} of {len(chosen)} samples have a temperature; set it for all of them or for none")
    if not own:
        return None
    return torch.repeat_interleave(torch.tensor(own), torch.tensor([len(sample.response_ids) for sample in chosen]))


def _joined(chosen: Sequence[TrainSample], stream: Stream) -> Tensor:
    """Return a stream of all chosen samples, [R]. Where an optional stream is missing, it has the fill value.

    So has the one masked row of an empty micro-batch.
    """
    dtype: torch.dtype = getattr(torch, stream.dtype)
    if not chosen:
        return torch.full((1,), stream.fill, dtype=dtype)
    return torch.cat([_stream_of(sample, stream).to(dtype) for sample in chosen])


def _stream_of(sample: TrainSample, stream: Stream) -> Tensor:
    if stream.optional and stream.name not in sample.streams:
        return torch.full((len(sample.response_ids),), stream.fill)
    return sample.streams[stream.name]
