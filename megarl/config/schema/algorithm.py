"""The section `algorithm`: advantages, the terms of the loss and their corrections; a part of `schema.py`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.algorithms.correction.config import CorrectionConfig
from megarl.config.schema.section import Passed, Section
from megarl.config.schema.teacher_sections import DistillConfig


class KLConfig(Section):
    """KL to the reference policy."""

    coef: float = Field(0.0, ge=0, description="Coefficient; 0 = no reference pass at all.")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="One of Schulman's KL estimators.")
    where: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or subtracted from the reward.")


class CrossEntropyConfig(Section):
    """The loss term `ce`: the cross-entropy -log p of tokens, at the sampling temperature. Rows may bring weights."""

    coef: float = Field(1.0, ge=0, description="Coefficient of the term.")
    tokens: Literal["none", "observations", "sampled", "all"] = Field(
        "none",
        description="Response tokens that have the weight 1 in rows which bring no `ce_weights`: none, those that the "
        "model did not sample (what a tool answered), those that it did, or all.",
    )


class OverlongConfig(Section):
    """DAPO's soft penalty for overlong responses."""

    buffer_tokens: int = Field(
        0, ge=0, description="Length of the penalised range below `sampling.max_tokens`, in tokens; 0 = off."
    )
    penalty: float = Field(1.0, ge=0, description="Penalty at full length.")


class AlgorithmConfig(Section):
    """Advantages and the policy loss."""

    advantage: str = Field(
        "grpo",
        description="The advantage: a name from the table below, or one's own as package.module:function "
        "(docs/algorithms.md).",
    )
    advantage_options: Passed = Field(default_factory=dict, description="Options of the advantage, by the table below.")
    loss: str = Field(
        "ppo",
        description="The policy loss: a name from the table below, or one's own as package.module:function "
        "(docs/algorithms.md).",
    )
    loss_options: Passed = Field(default_factory=dict, description="Options of the loss, by the table below.")
    clip_low: float | None = Field(None, description="Short form of `loss_options.clip_low`.")
    clip_high: float | None = Field(None, description="Short form of `loss_options.clip_high`.")
    clip_dual: float | None = Field(None, description="Short form of `loss_options.clip_dual`.")
    ce: CrossEntropyConfig = Field(default_factory=CrossEntropyConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    aggregation: Literal["token_mean", "sequence_mean", "constant_length"] = Field(
        "token_mean", description="How token losses are combined, by global counts of the mini-batch."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Entropy bonus coefficient.")
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    filter_zero_variance: bool | None = Field(
        None,
        description="Drop (and count) groups whose rewards are all equal; default: true, but with reinforce_pp, for "
        "which they have a signal.",
    )
    permute_rewards: bool = Field(
        False,
        description="Control experiment: shuffle the rewards inside each group, so that nothing can be learnt.",
    )
    old_logprobs: Literal["rollout", "trainer"] = Field(
        "rollout",
        description="Old log-probs: the engine's, or recomputed by the trainer. A correction needs the trainer's: with "
        "`rollout` and one mini-batch it takes them from the update itself.",
    )
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
