"""Random ragged batches, packed for megarl and padded for the references."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.objective.objective import (
    Aggregation,
    GlobalCounts,
    KLEstimator,
    LossInputs,
    Objective,
    TermCounts,
    micro_batch_loss,
)
from megarl.algorithms.objective.stats import LossStats

MAX_TOKENS = 16


@dataclass
class Batch:
    """Per-sequence lists of fp64 tensors [length]; `advantages` one number per sequence.

    `rollout`: log-probs of the policy that sampled; by default those of the old one.
    """

    logprobs: list[Tensor]
    old: list[Tensor]
    reference: list[Tensor]
    entropy: list[Tensor]
    mask: list[Tensor]
    advantages: list[float]
    rollout: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rollout = self.rollout or [t.clone() for t in self.old]

    @property
    def lengths(self) -> list[int]:
        return [len(t) for t in self.logprobs]

    def counts(self) -> GlobalCounts:
        return GlobalCounts.of([int(m.sum()) for m in self.mask], MAX_TOKENS)

    def padded(self, name: str, fill: float = 0.0) -> Tensor:
        """[B, L], right-padded."""
        values: list[Tensor] = getattr(self, name)
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)


def random_batch(
    seed: int, lengths: Sequence[int] = (5, 1, 9, 3, 16, 2), spread: float = 0.5, holes: bool = True
) -> Batch:
    """Ratios of about exp(+-spread), advantages of both signs, masks with holes but no sequence fully masked."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(length, generator=generator, dtype=torch.float64)

    logprobs = [-draw(n).abs() - 0.1 for n in lengths]
    mask = [torch.rand(n, generator=generator) > (0.25 if holes else -1.0) for n in lengths]
    for each in mask:
        if not each.any():
            each[0] = True
    batch = Batch(
        logprobs=logprobs,
        old=[lp + draw(len(lp), spread) for lp in logprobs],
        reference=[lp + draw(len(lp), 0.7) for lp in logprobs],
        entropy=[draw(n).abs() for n in lengths],
        mask=mask,
        advantages=[float(x) for x in draw(len(lengths))],
    )
    batch.rollout = [old + draw(len(old), 0.6) for old in batch.old]
    return batch


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


@dataclass
class Result:
    loss: float
    gradient: list[Tensor]  # d loss / d logprobs, per sequence
    entropy_gradient: list[Tensor]
    stats: LossStats


@dataclass(frozen=True)
class LossSpec:
    """An objective with a clipped ratio, as flat fields for those who write it again from the papers."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kind: str = "ppo"
    clip_dual: float | None = None
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token_mean"
    correction: CorrectionSpec | None = None

    @property
    def objective(self) -> Objective:
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high, "clip_dual": self.clip_dual}
        return Objective(
            LOSSES.find(self.kind).choose(clip),
            self.aggregation,
            kl_coef=self.kl_coef,
            kl_estimator=self.kl_estimator,
            entropy_coef=self.entropy_coef,
            correction=self.correction,
        )


def loss_spec(**changes: Any) -> LossSpec:
    """PPO's symmetric clip, with changes."""
    return LossSpec(**changes)


def packed_result(
    batch: Batch,
    spec: LossSpec | Objective,
    split: Sequence[Sequence[int]] | None = None,
    counts: TermCounts | None = None,
) -> Result:
    """megarl's loss, over micro-batches that hold the sequences of `split` (default: one with all)."""
    objective = spec.objective if isinstance(spec, LossSpec) else spec
    counts = counts or TermCounts.without_streams(batch.counts())
    leaves = [t.clone().requires_grad_() for t in batch.logprobs]
    entropies = [t.clone().requires_grad_() for t in batch.entropy]
    total = torch.zeros((), dtype=torch.float64)
    parts = []
    for indices in split if split is not None else [list(range(len(leaves)))]:

        def pack(values: Sequence[Tensor]) -> Tensor:
            return torch.cat([torch.zeros(0, dtype=torch.float64), *(values[i] for i in indices)])

        lengths = [batch.lengths[i] for i in indices]
        advantages = [torch.full((len(leaves[i]),), batch.advantages[i], dtype=torch.float64) for i in indices]
        inputs = LossInputs(
            logprobs_R=pack(leaves),
            mask_R=pack([m.double() for m in batch.mask]).bool(),
            cu_seqlens=cu_seqlens(lengths),
            counts=counts,
            streams={
                "old_logprobs": pack(batch.old),
                "rollout_logprobs": pack(batch.rollout),
                "advantages": torch.cat([torch.zeros(0, dtype=torch.float64), *advantages]),
                "reference_logprobs": pack(batch.reference),
            },
            entropy_R=pack(entropies),
        )
        result = micro_batch_loss(objective, inputs)
        total = total + result.loss
        parts.append(result.stats)
    total.backward()
    zeros = [torch.zeros_like(t) for t in leaves]
    return Result(
        float(total.detach()),
        [z if t.grad is None else t.grad for t, z in zip(leaves, zeros, strict=True)],
        [z if t.grad is None else t.grad for t, z in zip(entropies, zeros, strict=True)],
        LossStats.merge(parts),
    )
