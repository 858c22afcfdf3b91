"""Losses and advantages against the functions of verl 0.9.1 and areal 1.0.4 themselves, on the same fp64 tensors.

Where the definitions differ:
- verl's PPO has its dual clip always on (`clip_ratio_c`, 3.0); ours has it where `clip_dual` is given.
- verl bounds the log-ratio by 20 on both sides (GSPO: by 10 above), ours by 20 above. No tensor here is near.
- areal's GSPO differentiates the sequence's mean, and averages the advantages of a sequence; ours, like verl's, has the
  gradient of GSPO-token. With one advantage per sequence both are equal.
- verl's SAPO has one aggregation, `seq-mean-token-mean`, whatever is set; areal's losses have the token mean.
- verl adds 1e-8 to the number of tokens of a sequence in `seq-mean-token-mean`, so that the last digits differ.
- areal's PPO is the decoupled objective: its `proximal_logprobs` are our old ones, and its `old_logprobs` are those of
  the behaviour policy, which are not used without rejection sampling.
- DPPO-TV and DPPO-KL are two losses of verl, and one with an option here; their `clip_ratio_c` is our `cap`.
- verl's GRPO has eps 1e-6, ours TRL's 1e-4; Dr. GRPO is its `norm_adv_by_std_in_grpo=False`.
- verl's REINFORCE++ discounts (`gamma`), and takes rewards per token; ours has one reward per sample and no discount.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms.advantages import ADVANTAGES
from megarl.algorithms.interface.group_rewards import GroupRewards, advantages_of
from megarl.algorithms.losses import LOSSES
from megarl.algorithms.objective.objective import Aggregation, Objective
from tests.support.losses.loss_batches import MAX_TOKENS, Batch, cu_seqlens, packed_result, random_batch
from tests.support.losses.oracles import oracle

pytestmark = pytest.mark.oracle

CLIP = {"clip_low": 0.1, "clip_high": 0.25}
VERL_CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.25}
# verl's loss and fields of its ActorConfig; ours and its options.
VERL: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "ppo": ("vanilla", {**VERL_CLIP, "clip_ratio_c": 1.5}, "ppo", {**CLIP, "clip_dual": 1.5}),
    "gspo": ("gspo", VERL_CLIP, "gspo", CLIP),
    "cispo": ("cispo", VERL_CLIP, "cispo", CLIP),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 3.0}, "sapo", {"tau_positive": 1.0, "tau_negative": 3.0}),
    "dppo tv": (
        "dppo_tv",
        {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1.4},
        "dppo",
        {"divergence": "tv", "low": 0.05, "high": 0.1, "cap": 1.4},
    ),
    "dppo kl": (
        "dppo_kl",
        {"clip_ratio_low": 0.01, "clip_ratio_high": 0.03, "clip_ratio_c": 1.4},
        "dppo",
        {"divergence": "kl", "low": 0.01, "high": 0.03, "cap": 1.4},
    ),
}
AGGREGATIONS: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant_length": "seq-mean-token-sum-norm",
}


def batches() -> list[Batch]:
    found = [random_batch(seed, spread=0.7) for seed in range(4)]
    for batch in found:
        batch.old = [values.clamp(max=-1e-3) for values in batch.old]  # as log-probs are
    return found


def padded_advantages(batch: Batch) -> Tensor:
    mask_BL = batch.padded("mask")
    return torch.tensor(batch.advantages, dtype=torch.float64)[:, None].expand(mask_BL.shape).contiguous()


def assert_same(batch: Batch, objective: Objective, loss: Tensor, leaf_BL: Tensor, rtol: float) -> None:
    loss.backward()
    gradient_BL = leaf_BL.grad
    assert gradient_BL is not None
    ours = packed_result(batch, objective)
    assert ours.loss == pytest.approx(float(loss.detach()), rel=rtol)
    for index, mine in enumerate(ours.gradient):
        torch.testing.assert_close(mine, gradient_BL[index, : len(mine)], rtol=rtol, atol=1e-12)
    assert any(gradient.any() for gradient in ours.gradient)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", VERL)
def test_losses_equal_verl(case: str, aggregation: Aggregation) -> None:
    core, workers = oracle("verl.trainer.ppo.core_algos"), oracle("verl.workers.config")
    theirs, fields, name, options = VERL[case]
    if theirs == "sapo":
        aggregation = "sequence_mean"
    fixed = {"strategy": "fsdp", "rollout_n": 2, "ppo_micro_batch_size_per_gpu": 1}
    config = workers.ActorConfig(**fixed, **fields)
    config.global_batch_info["loss_scale_factor"] = MAX_TOKENS
    for batch in batches():
        leaf_BL = batch.padded("logprobs").requires_grad_()
        loss, _ = core.get_policy_loss_fn(theirs)(
            old_log_prob=batch.padded("old"),
            log_prob=leaf_BL,
            advantages=padded_advantages(batch),
            response_mask=batch.padded("mask").double(),
            loss_agg_mode=AGGREGATIONS[aggregation],
            config=config,
        )
        objective = Objective(LOSSES.find(name).choose(options), aggregation)
        assert_same(batch, objective, loss, leaf_BL, 1e-7 if aggregation == "sequence_mean" else 1e-9)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("dual", [None, 1.5])
def test_ppo_and_gspo_equal_areal(level: str, dual: float | None) -> None:
    functional = oracle("areal.utils.functional.functional")
    options = CLIP | {"clip_dual": dual}
    for batch in batches():
        new_R = torch.cat(batch.logprobs).requires_grad_()
        lengths = batch.lengths
        loss, _ = functional.ppo_actor_loss_fn(
            logprobs=new_R,
            proximal_logprobs=torch.cat(batch.old),
            old_logprobs=torch.cat(batch.rollout),
            advantages=torch.tensor(batch.advantages, dtype=torch.float64).repeat_interleave(torch.tensor(lengths)),
            eps_clip=options["clip_low"],
            eps_clip_higher=options["clip_high"],
            c_clip=dual,
            loss_mask=torch.cat(batch.mask),
            importance_sampling_level=level,
            cu_seqlens=cu_seqlens(lengths),
        )
        check_packed(batch, Objective(LOSSES.find("ppo" if level == "token" else "gspo").choose(options)), loss, new_R)


def test_sapo_equals_areal() -> None:
    functional = oracle("areal.utils.functional.functional")
    for batch in batches():
        new_R = torch.cat(batch.logprobs).requires_grad_()
        loss, _ = functional.sapo_loss_fn(
            logprobs=new_R,
            old_logprobs=torch.cat(batch.old),
            advantages=torch.tensor(batch.advantages, dtype=torch.float64).repeat_interleave(
                torch.tensor(batch.lengths)
            ),
            tau_pos=1.0,
            tau_neg=1.05,
            loss_mask=torch.cat(batch.mask),
        )
        check_packed(batch, Objective(LOSSES.find("sapo").choose({})), loss, new_R)


def check_packed(batch: Batch, objective: Objective, loss: Tensor, leaf_R: Tensor) -> None:
    (gradient_R,) = torch.autograd.grad(loss, leaf_R)
    ours = packed_result(batch, objective)
    assert ours.loss == pytest.approx(float(loss.detach()), rel=1e-9)
    torch.testing.assert_close(torch.cat(ours.gradient), gradient_R, rtol=1e-9, atol=1e-12)


# Ours and its options; verl's name and further arguments.
ADVANTAGE_CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo": ({"eps": 1e-6}, "grpo", {}),
    "dr_grpo": ({}, "grpo", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ({}, "rloo", {}),
    "reinforce_pp": ({}, "reinforce_plus_plus", {}),
    "reinforce_pp_baseline": ({}, "reinforce_plus_plus_baseline", {}),
}


@pytest.mark.parametrize("name", ADVANTAGE_CASES)
def test_advantages_equal_verl(name: str) -> None:
    core, settings = oracle("verl.trainer.ppo.core_algos"), oracle("verl.trainer.config.algorithm")
    options, theirs, arguments = ADVANTAGE_CASES[name]
    function: Callable[..., tuple[Tensor, Tensor]] = core.get_adv_estimator_fn(theirs)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        sizes = (4, 2, 6)
        rewards = [torch.rand(size, generator=generator, dtype=torch.float64) for size in sizes]
        tokens = [torch.randint(1, 9, (size,), generator=generator) for size in sizes]
        counts = torch.cat(tokens)
        mask_BL = (torch.arange(9)[None] < counts[:, None]).double()
        rewards_BL = torch.zeros_like(mask_BL)
        rewards_BL[torch.arange(len(counts)), counts - 1] = torch.cat(rewards)
        (got_BL, _) = function(
            token_level_rewards=rewards_BL,
            response_mask=mask_BL,
            index=np.repeat(np.arange(len(sizes)), sizes),
            config=settings.AlgoConfig(gamma=1.0),
            **arguments,
        )
        batch = GroupRewards([each.tolist() for each in rewards], [each.tolist() for each in tokens])
        ours = advantages_of(ADVANTAGES.find(name).choose(options), batch)
        expected = torch.tensor([value for group in ours for value in group], dtype=torch.float64)
        torch.testing.assert_close(expected[:, None] * mask_BL, got_BL, rtol=1e-7, atol=1e-9)
