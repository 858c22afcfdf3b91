"""The config sections of teachers: fixed models whose log-probs of the policy's own tokens are a target of training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from megarl.config.schema.section import Passed, Section


class TeacherConfig(Section):
    """A teacher. Data sets name the one that they learn from (`data.teacher`, `data.sets[].teacher`)."""

    name: str = Field(..., description="Name in `data.teacher`, log files and messages.")
    path: Path = Field(
        ...,
        description="Hugging Face directory, or with `trainer` a Megatron checkpoint; with the policy's vocabulary.",
    )
    where: Literal["engine", "trainer"] = Field(
        "engine",
        description="engine: vLLM engines of its own, on GPUs of the rollout pool, score each group before it goes "
        "into the queue. trainer: the trainer's ranks hold it in the policy's layout, and score the samples as they "
        "do for the reference policy, while they wait for a batch if they can.",
    )
    replicas: int = Field(1, ge=1, description="With `engine`: number of engines.")
    tensor_parallel: int = Field(1, ge=1, description="With `engine`: GPUs per engine, all on one node.")
    max_num_seqs: int = Field(64, ge=1, description="With `engine`: sequences that an engine scores at once.")
    gpu_memory_utilization: float = Field(
        0.85, gt=0, le=1, description="With `engine`: share of each GPU's memory that vLLM uses."
    )
    engine_kwargs: Passed = Field(
        default_factory=dict, description="With `engine`: as `rollout.engine_kwargs`; nothing is inherited from there."
    )
    placement: Literal["gpu", "cpu_offload"] = Field(
        "cpu_offload", description="With `trainer`: where its weights are kept between passes."
    )


class DistillConfig(Section):
    """On-policy distillation: the reverse KL to the set's teacher on the tokens that the policy has sampled."""

    coef: float = Field(1.0, gt=0, description="Coefficient of the reverse KL.")
    where: Literal["advantage", "loss"] = Field(
        "advantage",
        description="advantage: each token's advantage is coef * (log-prob of the teacher - log-prob of the policy "
        "that sampled it), for the policy loss. loss: coef * KL is added to the loss by the term `ref_kl`.",
    )
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k2",
        description="With `loss`: one of Schulman's estimators. The gradient of k2 is that of the reverse KL, that of "
        "k1 has mean zero.",
    )
    rewards: bool = Field(
        False,
        description="Sets with a teacher are trained on their rewards too, as without one. false: the teacher is their "
        "only signal, and the reward is only reported.",
    )
