"""The section `algorithm`: advantages, the terms of the loss and their corrections."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from megarl.algorithms.correction.config import CorrectionConfig
from megarl.common.options import Passed, Section


class TeacherConfig(Section):
    """A fixed model whose log-probs of the policy's tokens are a target, named in `data.teacher` of data sets."""

    name: str = Field(..., description="Name in `data.teacher`, log files and messages.")
    path: Path
    """Hugging Face directory, or with `trainer` a Megatron checkpoint; with the policy's vocabulary."""
    where: Literal["engine", "trainer"] = "engine"
    """engine: vLLM engines of its own, on GPUs of the rollout pool, score each group before it enters the queue.
    trainer: the trainer's ranks hold it in the policy's layout and score samples as for the reference policy, if
    possible while they wait for a batch."""
    replicas: int = Field(1, ge=1, description="With `engine`: number of engines.")
    tensor_parallel: int = Field(1, ge=1, description="With `engine`: GPUs per engine, all on one node.")
    gpu_share: float | None = Field(None, ge=0.01, le=0.5)
    """With `engine`: each engine shares the GPU of one of the policy's engines and counts as this share of it. Both
    `gpu_memory_utilization` divide its memory. Empty: GPUs of its own."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """With `engine`: share of each GPU's memory that vLLM uses."""
    engine_kwargs: Passed = Field(default_factory=dict)
    """With `engine`: as `rollout.engine_kwargs`; nothing is inherited from there."""


class DistillConfig(Section):
    """On-policy distillation: the reverse KL to the set's teacher on the tokens that the policy sampled."""

    coef: float = Field(1.0, gt=0, description="Coefficient of the reverse KL.")
    where: Literal["advantage", "loss"] = "advantage"
    """advantage: each token's advantage is coef * (log-prob of the teacher - log-prob of the policy that sampled it),
    for the policy loss. loss: coef * KL is added to the loss by the term `ref_kl`."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """With `loss`: one of Schulman's estimators. The gradient of k2 is that of the reverse KL, that of k1 has mean
    zero."""
    rewards: bool = False
    """Sets with a teacher are trained on their rewards too. false: the teacher is their only signal, and the reward is
    only reported."""


class KLConfig(Section):
    """KL to the reference policy."""

    coef: float = Field(0.0, ge=0, description="Coefficient; 0 = no reference pass at all.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="One of Schulman's KL estimators.")
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or subtracted from the reward.")


class CrossEntropyConfig(Section):
    """The loss term `ce`: the cross-entropy -log p of tokens, at the sampling temperature. Rows may bring weights."""

    coef: float = Field(1.0, ge=0, description="Coefficient of the term.")
    tokens: Literal["none", "observations", "sampled", "all"] = "none"
    """Response tokens with weight 1 in rows without `ce_weights`: none, those that the model did not sample (a tool's
    answers), those that it sampled, or all."""


class OverlongConfig(Section):
    """DAPO's soft penalty for overlong responses."""

    buffer_tokens: int = Field(0, ge=0)
    """Length of the penalised range below `sampling.max_tokens`, in tokens; 0 = off."""
    penalty: float = Field(1.0, ge=0, description="Penalty at full length.")


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    advantage: str = "grpo"
    """The advantage: a name from the table below, or your own as package.module:function (docs/training.md)."""
    advantage_options: Passed = Field(default_factory=dict, description="Options of the advantage, by the table below.")
    loss: str = "ppo"
    """The policy loss: a name from the table below, or your own as package.module:function (docs/training.md)."""
    loss_options: Passed = Field(default_factory=dict, description="Options of the loss, by the table below.")
    ce: CrossEntropyConfig = CrossEntropyConfig()
    kl: KLConfig = KLConfig()
    distill: DistillConfig = DistillConfig()
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = "token_mean"
    """How token losses are combined, by global counts of the mini-batch."""
    entropy_coef: float = Field(0.0, ge=0, description="Entropy bonus coefficient.")
    overlong: OverlongConfig = OverlongConfig()
    filter_zero_variance: bool | None = None
    """Drop (and count) groups whose rewards are all equal. Default: true, except with reinforce_pp, to which they give
    a signal."""
    permute_rewards: bool = False
    """Control experiment: shuffle the rewards inside each group, so nothing can be learned."""
    old_logprobs: Literal["rollout", "trainer"] = "rollout"
    """Old log-probs: the engine's, or recomputed by the trainer. A correction needs the trainer's: with `rollout` and
    one mini-batch it takes them from the update itself."""
    correction: CorrectionConfig = CorrectionConfig()
