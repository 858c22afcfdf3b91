"""The level of each key: `basic` if most runs set it, else `expert`. Basic keys are printed and documented first."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

# Dotted keys, without the places in lists.
BASIC = frozenset({
    "run.name", "run.dir", "run.steps",
    "model.path",
    "trainer.gpus", "trainer.gpus_per_node", "trainer.parallel.tensor", "trainer.parallel.context",
    "trainer.parallel.pipeline", "trainer.parallel.expert", "trainer.parallel.sequence", "trainer.micro_batch_tokens",
    "trainer.optimizer.lr", "trainer.optimizer.warmup_steps",
    "algorithm.advantage", "algorithm.loss", "algorithm.kl.coef",
    "batch.groups", "batch.samples_per_group",
    "sampling.max_tokens", "sampling.temperature",
    "data.path", "data.sets", "data.sets.name", "data.sets.path", "data.sets.weight", "data.format",
    "data.max_prompt_tokens",
    "reward.function", "reward.workers",
    "agent.loop",
    "tools", "tools.kind",
    "evaluation.sets", "evaluation.sets.name", "evaluation.sets.path", "evaluation.every",
    "rollout.replicas", "rollout.tensor_parallel", "rollout.gpus_per_node", "rollout.gpu_memory_utilization",
    "admission.mode", "admission.sync_interval", "admission.max_staleness",
    "checkpoint.every", "checkpoint.keep_last",
    "launch.time_limit",
})  # fmt: skip


def level(key: str) -> Literal["basic", "expert"]:
    """Return the level of a dotted key; a section has its most basic key's."""
    return "basic" if key in BASIC or any(each.startswith(f"{key}.") for each in BASIC) else "expert"


def ordered(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Return the names of a section's keys, basic ones first.

    `prefix`: the section's key and a dot; empty for the whole config.
    """
    return sorted(section.model_fields, key=lambda name: level(prefix + name))
