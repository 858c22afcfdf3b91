"""From samples to packed micro-batches: sequences end to end (THD), no padding inside or between them.

Shapes: T tokens of a micro-batch (prompts and responses), R response tokens, S sequences. Only the R rows that
predict a response token are projected onto the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class TrainSample:
    """One prompt with its response, as one replica sees it. Tensors are per response token, on the CPU.

    `old_logprobs` and `reference_logprobs` (fp32) are at the sampling temperature; `loss_mask` (bool; None = all)
    marks the response tokens that are trained.
    """

    key: str
    prompt_ids: list[int]
    response_ids: list[int]
    advantage: float = 0.0
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    loss_mask: Tensor | None = None

    @property
    def length(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def trained_tokens(self) -> int:
        """Response tokens in the loss."""
        return len(self.response_ids) if self.loss_mask is None else int(self.loss_mask.sum())


@dataclass(frozen=True)
class MicroBatch:
    """One packed forward (and backward) pass.

    An empty micro-batch is one dummy sequence: it goes through every collective, its only row is masked, and
    `tokens` is 0. With sequence parallelism T is padded to a multiple of TP by one more dummy sequence. Padding is the
    tail of T: it reaches neither the loss nor the routers' balancing.
    """

    input_ids: Tensor  # int64 [1, T]
    position_ids: Tensor  # int64 [1, T], from 0 in each sequence
    cu_seqlens: Tensor  # int32 [S + 1] over T
    max_seqlen: int
    rows: Tensor  # int64 [R]: the row of T that predicts each response token
    targets: Tensor  # int64 [R]: the response tokens
    response_cu_seqlens: Tensor  # int32 [S + 1] over R; the dummies have no rows
    mask: Tensor  # bool [R]: trained tokens
    advantages: Tensor  # fp32 [R]
    old_logprobs: Tensor | None  # fp32 [R]
    reference_logprobs: Tensor | None  # fp32 [R]
    samples: tuple[int, ...]  # indices of the samples, in packing order
    tokens: int  # T without padding; weights Megatron's auxiliary losses

    @property
    def is_empty(self) -> bool:
        return not self.samples

    def padding_mask(self) -> Tensor | None:
        """bool [1, T], True for padding; None without any."""
        length = self.input_ids.shape[1]
        if self.tokens == length:
            return None
        return torch.arange(length, device=self.input_ids.device)[None] >= self.tokens

    def packed_seq_params(self) -> PackedSeqParams:
        """Megatron's description of the packing."""
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """The same with all tensors on `device`."""
        moved = {
            field.name: value.to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)


def check_samples(samples: Sequence[TrainSample], vocab_size: int) -> None:
    """Raises ValueError naming the sample and what is wrong with its tokens, log-probs or mask."""
    for sample in samples:
        if not sample.prompt_ids or not sample.response_ids:
            raise ValueError(f"sample {sample.key}: prompt and response need at least one token each")
        if not 0 <= min(sample.prompt_ids + sample.response_ids) <= max(
            sample.prompt_ids + sample.response_ids
        ) < vocab_size:  # fmt: skip
            raise ValueError(f"sample {sample.key}: a token id is outside the vocabulary of {vocab_size}")
        for name in ("old_logprobs", "reference_logprobs", "loss_mask"):
            value: Tensor | None = getattr(sample, name)
            if value is not None and value.shape != (len(sample.response_ids),):
                raise ValueError(
                    f"sample {sample.key}: {name} has shape {tuple(value.shape)}, "
                    f"but the response has {len(sample.response_ids)} tokens"
                )


def pack(samples: Sequence[TrainSample], indices: Sequence[int], align: int = 1) -> MicroBatch:
    """Lay `samples[i] for i in indices` end to end; T is padded to a multiple of `align` (TP under SP).

    `old_logprobs` and `reference_logprobs` are packed if every sample has them, otherwise None.
    """
    chosen = [samples[index] for index in indices]
    lengths = [sample.length for sample in chosen]
    used = sum(lengths)
    dummy = max(-used % align, 0) if chosen else align
    ids = [token for sample in chosen for token in (*sample.prompt_ids, *sample.response_ids)] + [0] * dummy
    all_lengths = lengths + [dummy] * bool(dummy)
    starts = _cumulative(all_lengths)
    responses = [len(sample.response_ids) for sample in chosen]
    # Row (start + prompt - 1 + j) predicts response token j.
    rows = [
        torch.arange(count) + (start + len(sample.prompt_ids) - 1)
        for sample, start, count in zip(chosen, starts.tolist(), responses, strict=False)
    ]
    # An empty micro-batch keeps one masked row, so that backward reaches every stage and parameter.
    rows = rows or [torch.zeros(1, dtype=torch.int64)]
    targets = [token for sample in chosen for token in sample.response_ids] or [0]
    return MicroBatch(
        input_ids=torch.tensor([ids]),
        position_ids=torch.cat([torch.arange(length) for length in all_lengths])[None],
        cu_seqlens=starts,
        max_seqlen=max(all_lengths),
        rows=torch.cat(rows),
        targets=torch.tensor(targets),
        response_cu_seqlens=_cumulative(responses or [1]),
        mask=_join(chosen, _mask, torch.zeros(1, dtype=torch.bool)),
        advantages=_join(chosen, lambda s: torch.full((len(s.response_ids),), s.advantage), torch.zeros(1)),
        old_logprobs=_join_optional(chosen, "old_logprobs"),
        reference_logprobs=_join_optional(chosen, "reference_logprobs"),
        samples=tuple(indices),
        tokens=used,
    )


def unpack(values: Tensor, samples: Sequence[TrainSample], indices: Sequence[int]) -> list[Tensor]:
    """Cut packed response values [R] into one tensor per sample of `indices`; an empty micro-batch gives []."""
    if not indices:
        return []
    return list(values.split([len(samples[index].response_ids) for index in indices]))


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _mask(sample: TrainSample) -> Tensor:
    if sample.loss_mask is None:
        return torch.ones(len(sample.response_ids), dtype=torch.bool)
    return sample.loss_mask.bool()


def _join(chosen: Sequence[TrainSample], of: Callable[[TrainSample], Tensor], empty: Tensor) -> Tensor:
    return torch.cat([of(sample) for sample in chosen]) if chosen else empty


def _join_optional(chosen: Sequence[TrainSample], name: str) -> Tensor | None:
    values = [getattr(sample, name) for sample in chosen]
    if any(value is None for value in values):
        return None
    return torch.cat([value.float() for value in values]) if values else torch.zeros(1)
