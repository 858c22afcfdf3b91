"""TRL's GRPO loss, called on a bare trainer instance, on the tensors of a Batch."""

import importlib
from collections import defaultdict
from functools import cache
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from tests.support.losses.loss_batches import MAX_TOKENS, Batch, LossSpec, Result

# The loss types that are an aggregation of the same token losses.
LOSS_TYPES = {
    "grpo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "constant_length",
}


@cache
def grpo_module() -> ModuleType:
    """TRL's own module, imported without vLLM, which it would load for nothing."""
    with mock.patch("trl.import_utils.is_vllm_available", lambda *args, **kwargs: False):
        return importlib.import_module("trl.trainer.grpo_trainer")


class _OneProcess:
    num_processes = 1

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


# The loss types that are losses of their own, and how each is aggregated.
OWN_LOSS_TYPES = {"cispo": "token_mean", "sapo": "sequence_mean"}


def trl_result(batch: Batch, spec: LossSpec, loss_type: str, **settings: float) -> Result:
    """`settings`: further arguments of TRL's config; `epsilon_high` of CISPO is the bound of the weight itself."""
    GRPOTrainer = grpo_module().GRPOTrainer
    assert spec.kl_estimator == "k3" and spec.aggregation == {**LOSS_TYPES, **OWN_LOSS_TYPES}[loss_type]
    logprobs_BL = batch.padded("logprobs").requires_grad_()
    entropy_BL = batch.padded("entropy").requires_grad_()
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.model = SimpleNamespace(training=False)  # eval: no division by gradient accumulation steps
    trainer.args = SimpleNamespace(delta=spec.clip_dual, use_bias_correction_kl=False, **settings)
    trainer.accelerator = _OneProcess()
    trainer.loss_type = loss_type
    trainer.importance_sampling_level = "sequence" if spec.kind == "gspo" else "token"
    trainer.epsilon_low, trainer.epsilon_high = spec.clip_low, settings.get("epsilon_high", spec.clip_high)
    trainer.beta = spec.kl_coef
    trainer.max_completion_length = MAX_TOKENS
    trainer.entropy_coef = spec.entropy_coef
    trainer._entropy_bonus_enabled = spec.entropy_coef != 0.0
    trainer.use_adaptive_entropy = False
    trainer.aux_loss_enabled = False
    trainer.top_entropy_quantile = 1.0
    trainer.off_policy_mask_threshold = None
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = spec.correction is not None
    cap = spec.correction.cap if spec.correction else 1.0
    trainer._metrics = {"eval": defaultdict(list)}
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs_BL, entropy_BL, None)
    mask_BL = batch.padded("mask").double()
    loss = trainer._compute_loss(
        None,
        {
            "prompt_ids": torch.zeros(len(mask_BL), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask_BL), 1),
            "completion_ids": torch.zeros_like(mask_BL, dtype=torch.long),
            "completion_mask": mask_BL,
            "advantages": torch.tensor(batch.advantages, dtype=torch.float64),
            "old_per_token_logps": batch.padded("old"),
            "ref_per_token_logps": batch.padded("reference"),
            # `token_truncate`; TRL computes it while it generates.
            "importance_sampling_ratio": (batch.padded("old") - batch.padded("rollout")).exp().clamp(max=cap),
            "num_items_in_batch": mask_BL.sum(),
        },
    )
    loss.backward()
    entropy_gradient = entropy_BL.grad if entropy_BL.grad is not None else torch.zeros_like(entropy_BL)
    result = Result(
        float(loss.detach()),
        [logprobs_BL.grad[i, :n] for i, n in enumerate(batch.lengths)],
        [entropy_gradient[i, :n] for i, n in enumerate(batch.lengths)],
        stats=None,  # type: ignore[arg-type]
    )
    result.metrics = {key: values[0] for key, values in trainer._metrics["eval"].items()}  # type: ignore[attr-defined]
    return result
