"""Packed micro-batches of samples: sequences laid end to end (THD), without padding inside or between them.

Shapes: T tokens of a micro-batch (prompts and responses), R response tokens, S sequences, L MoE layers of this rank, K
experts of a token. Only the R rows that predict
a response token are projected onto the vocabulary. Cumulative lengths keep Megatron-Core's name `cu_seqlens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.algorithms.objective.terms import WEIGHT_STREAMS
from megarl.queue.images import ImageRef
from megarl.queue.streams import ADVANTAGES, CE_WEIGHTS, STREAMS, Stream
from megarl.queue.trajectory import Trajectory

if TYPE_CHECKING:
    from megarl.models.megatron.vision_model import ImageBatch
    from megarl.trainer.packed_images import ImagePacker


@dataclass
class TrainSample:
    """One prompt with its response, as one replica trains it. All tensors are [R], per response token, on the CPU.

    `loss_mask_R` (bool; None = all) marks the response tokens that are trained. `streams`: values per response token,
    by the names that `megarl.queue.streams` declares; log-probs among them are fp32, at the sampling temperature.
    `temperature`: that of this sample, if the run's data sets differ in it; None: that of the run. `images`: those
    among its tokens, prompt and response, in their order. `routes_TLK`: the experts of each of its tokens, prompt and
    response, for the routers to replay, as small integers; None: they choose by themselves.
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
        """Make the sample of a trajectory, with its streams. `trained` False takes all its tokens out of every term."""
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
        if not trained and CE_WEIGHTS in sample.streams:  # it weighs tokens that the mask leaves out anyway
            sample.streams[CE_WEIGHTS] = torch.zeros(len(row.response_ids))
        return sample

    @property
    def length(self) -> int:
        """The number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def image_tokens(self) -> int:
        """The number of tokens that stand for images."""
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

        `starts`: the first token of each turn. What was inserted after a turn has the turn's, and is not trained.
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
    is 0. With sequence parallelism T is padded to a multiple of TP by one more dummy sequence. Padding is at the end of
    T: it reaches neither the loss nor the routers' load balancing.
    """

    input_ids_1T: Tensor  # int64
    position_ids: Tensor  # int64, from 0 in each sequence: [1, T], of a model that sees [3, 1, T]
    cu_seqlens: Tensor  # int32 [S + 1] over T
    max_seqlen: int
    rows_R: Tensor  # int64: the row of T that predicts each response token
    targets_R: Tensor  # int64: the response tokens
    response_cu_seqlens: Tensor  # int32 [S + 1] over R; a dummy sequence that pads T has no rows
    mask_R: Tensor  # bool: trained tokens
    streams: dict[str, Tensor]  # [R] each, by name: those that the samples of all replicas have (`agreed_streams`)
    samples: tuple[int, ...]  # indices of the samples, in packing order
    keys: tuple[str, ...]  # their keys, in the same order
    tokens: int  # T without padding; weights Megatron's auxiliary losses
    temperature_R: Tensor | None = None  # fp32, of each response token; None: that of the run
    images: ImageBatch | None = None  # None if there are none
    routes_TLK: Tensor | None = None  # the experts that each token's routers replay; None: they choose by themselves

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to train on: the only sequence is the dummy."""
        return not self.samples

    def padding_mask(self) -> Tensor | None:
        """Return a bool mask [1, T], True for padding; None if there is no padding."""
        length = self.input_ids_1T.shape[1]
        if self.tokens == length:
            return None
        return torch.arange(length, device=self.input_ids_1T.device)[None] >= self.tokens

    def packed_seq_params(self) -> PackedSeqParams:
        """Return Megatron's description of the packing."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
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
    """Raise ValueError if a sample's tokens, streams or mask are wrong, with a message that names the sample.

    `sees`: the model takes images.
    """
    for sample in samples:
        if not sample.prompt_ids or not sample.response_ids:
            raise ValueError(f"sample {sample.key}: prompt and response need at least one token each")
        if not 0 <= min(sample.prompt_ids + sample.response_ids) <= max(
            sample.prompt_ids + sample.response_ids
        ) < vocab_size:  # fmt: skip
            raise ValueError(f"sample {sample.key}: a token id is outside the vocabulary of {vocab_size}")
        if sample.images and not sees:
            raise ValueError(f"sample {sample.key}: it has images, and the model reads text only")
        for name, value in [("loss_mask", sample.loss_mask_R), *sample.streams.items()]:
            if value is not None and value.shape != (len(sample.response_ids),):
                raise ValueError(
                    f"sample {sample.key}: {name} has shape {tuple(value.shape)}, "
                    f"but the response has {len(sample.response_ids)} tokens"
                )
        for name in WEIGHT_STREAMS:
            if name in sample.streams and not bool(sample.streams[name].isfinite().all()):
                raise ValueError(f"sample {sample.key}: a value of {name} is not finite")


def check_routes(samples: Sequence[TrainSample], layers: int, topk: int, experts: int) -> None:
    """Raise ValueError, with a message that names the sample, unless each has `topk` of `experts` per token and layer.

    Megatron-Core takes missing rows and repeated experts without an error, and routes to fewer experts or none.
    """
    for sample in samples:
        if sample.routes_TLK is None:
            raise ValueError(f"sample {sample.key} has no experts to replay (trainer.router_replay)")
        wanted = (sample.length, layers, topk)
        if tuple(sample.routes_TLK.shape) != wanted:
            raise ValueError(
                f"sample {sample.key}: its experts have shape {list(sample.routes_TLK.shape)}, not [tokens, layers, "
                f"experts of a token] = {list(wanted)}"
            )
        sorted_TLK = sample.routes_TLK.long().sort(-1).values
        if sorted_TLK.numel() and (
            int(sorted_TLK.min()) < 0
            or int(sorted_TLK.max()) >= experts
            or bool((sorted_TLK[..., 1:] == sorted_TLK[..., :-1]).any())
        ):
            raise ValueError(f"sample {sample.key}: a token has an expert twice, or one outside 0..{experts - 1}")


def common_streams(samples: Sequence[TrainSample]) -> list[str]:
    """Return the names of the streams that every sample has, and of the optional ones that one of them has, sorted."""
    return agreed_streams(sample.streams for sample in samples)


def agreed_streams(found: Iterable[Iterable[str]]) -> list[str]:
    """Return the names that all of `found` have, and those of optional streams that one of them has, sorted."""
    sets = [set(names) for names in found]
    optional = {name for names in sets for name in names if STREAMS[name].optional}
    return sorted(set.intersection(*sets) | optional) if sets else []


def pack(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    align: int = 1,
    streams: Sequence[str] | None = None,
    packer: ImagePacker | None = None,
) -> MicroBatch:
    """Lay `samples[i] for i in indices` end to end, T padded to a multiple of `align` (TP under sequence parallelism).

    `streams`: names of the streams to pack, which all samples must have unless they are optional; None:
    `common_streams` of `samples`. `packer`: of a model that sees. Raises ValueError for images outside their sample.
    """
    names = common_streams(samples) if streams is None else streams
    chosen = [samples[index] for index in indices]
    lengths = [sample.length for sample in chosen]
    used = sum(lengths)
    dummy = max(-used % align, 0) if chosen else align
    ids = [token for sample in chosen for token in (*sample.prompt_ids, *sample.response_ids)] + [0] * dummy
    all_lengths = lengths + [dummy] * bool(dummy)
    starts = _cumulative(all_lengths)
    responses = [len(sample.response_ids) for sample in chosen]
    # Row (start + prompt - 1 + j) predicts response token j.
    row_parts = [
        torch.arange(count) + (start + len(sample.prompt_ids) - 1)
        for sample, start, count in zip(chosen, starts.tolist(), responses, strict=False)
    ]
    # An empty micro-batch keeps one masked row, so that backward reaches every stage and parameter.
    row_parts = row_parts or [torch.zeros(1, dtype=torch.int64)]
    targets = [token for sample in chosen for token in sample.response_ids] or [0]
    return MicroBatch(
        input_ids_1T=torch.tensor([ids]),
        position_ids=torch.cat([torch.arange(length) for length in all_lengths])[None]
        if packer is None
        else packer.positions([(length, sample.images) for length, sample in zip(lengths, chosen, strict=True)], dummy),
        cu_seqlens=starts,
        max_seqlen=max(all_lengths),
        rows_R=torch.cat(row_parts),
        targets_R=torch.tensor(targets),
        response_cu_seqlens=_cumulative(responses or [1]),
        mask_R=torch.cat([sample.trained_mask for sample in chosen]) if chosen else torch.zeros(1, dtype=torch.bool),
        streams={name: _joined(chosen, STREAMS[name]) for name in names},
        samples=tuple(indices),
        keys=tuple(sample.key for sample in chosen),
        tokens=used,
        temperature_R=_temperatures(chosen),
        images=packer.pack([sample.images for sample in chosen], starts.tolist()) if packer is not None else None,
        routes_TLK=_routes(chosen, dummy),
    )


def _routes(chosen: Sequence[TrainSample], dummy: int) -> Tensor | None:
    """Return the experts of all tokens, those of a dummy sequence too; None unless the samples have some.

    The dummy's tokens go to the experts 0..K-1, all different as Megatron needs them.
    """
    parts = [sample.routes_TLK for sample in chosen if sample.routes_TLK is not None]
    if not parts:
        return None
    _, layers, topk = parts[0].shape
    fill_TLK = torch.arange(topk, dtype=parts[0].dtype).expand(dummy, layers, topk)
    return torch.cat([*parts, fill_TLK])


def unpack(values_R: Tensor, samples: Sequence[TrainSample], indices: Sequence[int]) -> list[Tensor]:
    """Cut packed response values into one tensor per sample of `indices`; return [] for an empty micro-batch."""
    if not indices:
        return []
    return list(values_R.split([len(samples[index].response_ids) for index in indices]))


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _temperatures(chosen: Sequence[TrainSample]) -> Tensor | None:
    """Return the temperature of each response token, [R]; None if the samples have none of their own.

    Raises ValueError if only some of them have one.
    """
    own = [sample.temperature for sample in chosen if sample.temperature is not None]
    if own and len(own) < len(chosen):
        raise ValueError(
            f"{len(own)} of {len(chosen)} samples have a temperature of their own; give one to all of them"
        )
    if not own:
        return None
    return torch.repeat_interleave(torch.tensor(own), torch.tensor([len(sample.response_ids) for sample in chosen]))


def _joined(chosen: Sequence[TrainSample], stream: Stream) -> Tensor:
    """Return a stream of all chosen samples, [R], with the fill value for those that lack it, if it is optional.

    For an empty micro-batch it is the fill value of its one masked row.
    """
    dtype: torch.dtype = getattr(torch, stream.dtype)
    if not chosen:
        return torch.full((1,), stream.fill, dtype=dtype)
    return torch.cat([_stream_of(sample, stream).to(dtype) for sample in chosen])


def _stream_of(sample: TrainSample, stream: Stream) -> Tensor:
    if stream.optional and stream.name not in sample.streams:
        return torch.full((len(sample.response_ids),), stream.fill)
    return sample.streams[stream.name]
