"""The work of one rank of a test world with a reference policy that takes the policy's weights, and is saved."""

from pathlib import Path
from typing import Any

from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy
from tests.support.ranks.checkpoints.saving import run_under, update
from tests.support.ranks.training.policy import exported, own_share

EVERY = 2


def state(policy: Policy, samples: list[TrainSample]) -> dict[str, Any]:
    assert policy.reference is not None
    _, mine = own_share(samples)
    results = policy.compute_logprobs(mine, reference=True)
    return {
        "weights": exported(policy, policy.reference.chunks),
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
            found[f"policy {step}"] = exported(policy)
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
        found: dict[str, Any] = {"policy 3": exported(policy)}
        if policy.reference is None:
            return found
        found["reference 3"] = state(policy, samples)
        update(policy, samples, 1)
        policy.refresh_reference(4)
        return found | {"reference 4": state(policy, samples)}
