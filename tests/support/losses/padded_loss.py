"""The same objectives written again from the papers, for one padded batch, sequence by sequence, in plain PyTorch.

Shares no code with megarl.algorithms; meant to be read against the equations, not to be fast.
"""

import torch
from torch import Tensor

from tests.support.losses.loss_batches import MAX_TOKENS, Batch, LossSpec, Result


def reference_result(batch: Batch, spec: LossSpec) -> Result:
    logprobs_BL = batch.padded("logprobs").requires_grad_()
    entropy_BL = batch.padded("entropy").requires_grad_()
    old_BL, reference_BL, rollout_BL = batch.padded("old"), batch.padded("reference"), batch.padded("rollout")
    mask_BL = batch.padded("mask").double()
    tensors = logprobs_BL, old_BL, rollout_BL, reference_BL, entropy_BL
    rows = [
        _row(spec, *(values_BL[i] for values_BL in tensors), mask_BL[i].bool(), advantage)
        for i, advantage in enumerate(batch.advantages)
    ]
    live = [row for row in rows if len(row)]
    if spec.aggregation == "token_mean":
        loss = torch.cat(live).mean()
    elif spec.aggregation == "sequence_mean":
        loss = torch.stack([row.mean() for row in live]).mean()
    else:
        loss = torch.stack([row.sum() / MAX_TOKENS for row in live]).mean()
    loss.backward()
    gradient = logprobs_BL.grad
    entropy_gradient = entropy_BL.grad if entropy_BL.grad is not None else torch.zeros_like(entropy_BL)
    assert gradient is not None
    return Result(
        float(loss.detach()),
        [gradient[i, :n] for i, n in enumerate(batch.lengths)],
        [entropy_gradient[i, :n] for i, n in enumerate(batch.lengths)],
        stats=None,  # type: ignore[arg-type]
    )


def _row(
    spec: LossSpec,
    new: Tensor,
    old: Tensor,
    rollout: Tensor,
    reference: Tensor,
    entropy: Tensor,
    mask: Tensor,
    advantage: float,
) -> Tensor:
    """Losses of the unmasked tokens of one sequence."""
    new, old, rollout, reference, entropy = new[mask], old[mask], rollout[mask], reference[mask], entropy[mask]
    ratio = new.exp() / old.exp()
    if spec.kind == "gspo":  # eq. 7: (pi(y) / pi_old(y)) ^ (1 / |y|), the same for every token
        ratio = ((new.sum() - old.sum()) / len(new)).exp().expand(len(new))
        if spec.correction is not None:  # eq. 14, GSPO-token: each token's gradient carries its own weight
            ratio = ratio.detach() * new.exp() / new.detach().exp()
    if advantage >= 0:
        objective = advantage * torch.where(ratio > 1 + spec.clip_high, 1 + spec.clip_high, ratio)
    else:
        objective = advantage * torch.where(ratio < 1 - spec.clip_low, 1 - spec.clip_low, ratio)
        if spec.clip_dual is not None:
            objective = torch.where(objective < spec.clip_dual * advantage, spec.clip_dual * advantage, objective)
    if spec.correction is not None:
        weight = old.exp() / rollout.exp()
        objective = objective * torch.where(weight > spec.correction.cap, spec.correction.cap, weight)
    ratio_of_reference = reference.exp() / new.exp()
    kl = {
        "k1": -ratio_of_reference.log(),
        "k2": ratio_of_reference.log() ** 2 / 2,
        "k3": ratio_of_reference - 1 - ratio_of_reference.log(),
    }[spec.kl_estimator]
    return -objective + spec.kl_coef * kl - spec.entropy_coef * entropy
