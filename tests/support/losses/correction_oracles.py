"""verl's and AReaL's own corrections, called on the tensors of a Batch, and their options for those of megarl."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.correction.apply import CorrectionSpec
from megarl.algorithms.correction.config import MaskConfig
from tests.support.losses.loss_batches import Batch, cu_seqlens
from tests.support.losses.oracles import oracle

# verl's options for the masks that it has under another name. Its bounds of k1 are of q / p.
VERL_MASKS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


@dataclass
class Corrected:
    """The result of one implementation, per token of each sequence; 0 where not trained."""

    weights: list[Tensor]
    kept: list[Tensor]
    metrics: dict[str, float]


def verl_corrected(batch: Batch, spec: CorrectionSpec) -> Corrected:
    helper = oracle("verl.trainer.ppo.rollout_corr_helper")
    old_BL, rollout_BL, mask_BL = batch.padded("old"), batch.padded("rollout"), batch.padded("mask").double()
    sequence = spec.kind.startswith("sequence")
    banded = spec.kind in ("icepop", "sequence_mis")
    proto, kept_BL, metrics = helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=old_BL,
        rollout_log_prob=rollout_BL,
        response_mask=mask_BL,
        rollout_is=None if spec.kind == "none" else "sequence" if sequence else "token",
        rollout_is_threshold=f"{spec.low}_{spec.high}" if banded else spec.cap,
        rollout_rs=",".join(VERL_MASKS.get(mask.kind, mask.kind) for mask in spec.masks) or None,
        rollout_rs_threshold=",".join(_verl_bounds(mask) for mask in spec.masks) or None,
    )
    weights_BL = mask_BL if proto is None else proto.batch["rollout_is_weights"]
    prefix = "rollout_corr/"
    return Corrected(
        _rows(weights_BL, batch),
        [row.bool() for row in _rows(kept_BL, batch)],
        {name.removeprefix(prefix): value for name, value in metrics.items()},
    )


def _verl_bounds(mask: MaskConfig) -> str:
    if VERL_MASKS.get(mask.kind, mask.kind).endswith("k1"):
        assert mask.low is not None
        low, high = (1.0 / mask.high, 1.0 / mask.low) if mask.kind in VERL_MASKS else (mask.low, mask.high)
        return f"{low!r}_{high!r}"
    return repr(mask.high)


def verl_loss(
    batch: Batch, corrected: Corrected, *, clip_low: float, clip_high: float, mode: str, tokens: int
) -> tuple[float, list[Tensor]]:
    """Loss and gradient of verl's `vanilla`. `tokens`: the denominator of a token mean."""
    core = oracle("verl.trainer.ppo.core_algos")
    actor = oracle("verl.workers.config").ActorConfig(
        strategy="fsdp", rollout_n=2, ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=clip_low, clip_ratio_high=clip_high, clip_ratio_c=1e9,
    )  # fmt: skip
    actor.global_batch_info.update({"batch_num_tokens": tokens})
    logprobs_BL = batch.padded("logprobs").requires_grad_()
    pad = torch.nn.utils.rnn.pad_sequence
    loss, _ = core.get_policy_loss_fn("vanilla")(
        old_log_prob=batch.padded("old"),
        log_prob=logprobs_BL,
        advantages=torch.tensor(batch.advantages, dtype=torch.float64)[:, None].expand_as(logprobs_BL),
        response_mask=pad([row.double() for row in corrected.kept], batch_first=True),
        loss_agg_mode=mode,
        config=actor,
        rollout_is_weights=pad(corrected.weights, batch_first=True),
    )
    loss.backward()
    return float(loss.detach()), _rows(logprobs_BL.grad, batch)


def areal_options(**options: Any) -> Any:
    return oracle("areal.api.cli_args").RejectionSamplingConfig(**options)


def areal_corrected(batch: Batch, options: Any) -> Corrected:
    result = oracle("areal.utils.functional.functional").apply_rejection_sampling(
        torch.cat(batch.old), torch.cat(batch.rollout), torch.cat(batch.mask), cu_seqlens(batch.lengths), options
    )
    lengths = batch.lengths
    return Corrected(
        list(result.behave_imp_weight.split(lengths)),
        [row.bool() for row in result.loss_mask.split(lengths)],
        {"filtered": result.filtered_fraction},
    )


def areal_loss(
    batch: Batch, options: Any, proximal: Sequence[Tensor], *, clip_low: float, clip_high: float
) -> tuple[float, list[Tensor]]:
    """Loss and gradient of AReaL's decoupled PPO, with the log-probs of a proximal policy."""
    logprobs_R = torch.cat(batch.logprobs).requires_grad_()
    advantages_S = torch.tensor(batch.advantages, dtype=torch.float64)
    loss, _ = oracle("areal.utils.functional.functional").ppo_actor_loss_fn(
        logprobs=logprobs_R,
        proximal_logprobs=torch.cat(list(proximal)),
        old_logprobs=torch.cat(batch.rollout),
        advantages=advantages_S.repeat_interleave(torch.tensor(batch.lengths)),
        eps_clip=clip_low,
        eps_clip_higher=clip_high,
        loss_mask=torch.cat(batch.mask),
        rejection_sampling=options,
        cu_seqlens=cu_seqlens(batch.lengths),
    )
    loss.backward()
    assert logprobs_R.grad is not None
    return float(loss.detach()), list(logprobs_R.grad.split(batch.lengths))


@cache
def areal_approximations() -> Callable[..., dict[str, Tensor]]:
    """`compute_prox_logp_approximations` of trainer/ppo/actor.py, from its source: the module needs three trackers."""
    module = Path(str(oracle("areal").__file__)).parent / "trainer" / "ppo" / "actor.py"
    found = [
        node
        for node in ast.parse(module.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "compute_prox_logp_approximations"
    ]
    scope: dict[str, Any] = {"torch": torch, **vars(oracle("areal.utils.constants"))}
    exec(compile(ast.Module(found, type_ignores=[]), str(module), "exec"), scope)
    function: Callable[..., dict[str, Tensor]] = scope["compute_prox_logp_approximations"]
    return function


def _rows(values_BL: Tensor, batch: Batch) -> list[Tensor]:
    return [values_BL[index, :length] for index, length in enumerate(batch.lengths)]
