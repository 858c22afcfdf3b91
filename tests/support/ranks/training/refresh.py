"""The work of one rank of a test world with a reference policy that takes the policy's weights, and is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.models.hf.export import HFExporter
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy
from tests.support.ranks.checkpoints.saving import run_under, update
from tests.support.ranks.training.policy import own_share

EVERY = 2


def reference_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """This rank's share of the reference under Hugging Face names."""
    assert policy.reference is not None
    exporter = HFExporter(policy.reference.chunks, policy.info, torch.float32)
    return {item.name: value.clone() for item, value in exporter.stream() if value is not None}


def policy_weights(policy: Policy) -> dict[str, torch.Tensor]:
    exporter = HFExporter(policy.module_chunks, policy.info, torch.float32)
    return {item.name: value.clone() for item, value in exporter.stream() if value is not None}


def state(policy: Policy, samples: list[TrainSample]) -> dict[str, Any]:
    _, mine = own_share(samples)
    results = policy.compute_logprobs(mine, reference=True)
    return {
        "weights": reference_weights(policy),
        "logprobs": {sample.key: found_R for sample, found_R in zip(mine, results, strict=True)},
        "step": policy.reference_step,
    }


def refresh_and_save(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], root: Path, **changes: Any
) -> dict[str, Any]:
    """Refresh after step 2, save after step 3, refresh again after step 4."""
    with run_under(model_dir, layout, root, reference__refresh_steps=EVERY, **changes) as (policy, checkpointer):
        found: dict[str, Any] = {"first": state(policy, samples), "due": []}
        for step in range(1, 5):
            update(policy, samples, 1)
            found["due"].append(policy.refresh_reference(step))
            found[f"policy {step}"] = policy_weights(policy)
            found[f"reference {step}"] = state(policy, samples)
            if step == 3:
                assert checkpointer.save(step, {}, wait=True), checkpointer.said
        return found


def resume(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], root: Path, **changes: Any
) -> dict[str, Any]:
    """Load what was saved after step 3, then make step 4."""
    with run_under(model_dir, layout, root, **{"reference__refresh_steps": EVERY, **changes}) as (policy, checkpointer):
        assert checkpointer.restore(lambda chosen: None)["step"] == 3
        found: dict[str, Any] = {"policy 3": policy_weights(policy)}
        if policy.reference is None:
            return found
        found["reference 3"] = state(policy, samples)
        update(policy, samples, 1)
        policy.refresh_reference(4)
        return found | {"reference 4": state(policy, samples)}
