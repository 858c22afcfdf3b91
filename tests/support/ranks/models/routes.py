"""The work of one rank of a test world whose routers replay experts."""

import gc
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megarl.common.process.memory_tuning import anonymous_bytes, return_freed_memory
from megarl.queue.routes import Routes
from megarl.queue.row_format import decode, encode
from megarl.trainer import policy as policy_module
from megarl.trainer.batch import TrainSample
from megarl.trainer.moe import RoutedExperts
from megarl.trainer.policy import Policy
from tests.support.losses.samples import trajectory_of
from tests.support.ranks.training.policy import exported_gradients, one_each, own_share, policy_under

R2 = {"trainer__router_replay": "r2", "algorithm__old_logprobs": "trainer"}


def replayed(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], routes: list[torch.Tensor],
    packed: bool = True, stale: bool = False, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """Gradients and log-probs with the experts `routes` [tokens, MoE layers of the model, K] of each sample.

    `stale`: what the backward pass computes again replays what went forward last.
    """
    begin = RoutedExperts.begin

    def forward_only(self: RoutedExperts, *args: Any) -> None:
        if not torch._C._current_graph_task_id() >= 0:
            begin(self, *args)

    with (
        mock.patch.object(
            policy_module, "plan_micro_batches", policy_module.plan_micro_batches if packed else one_each
        ),
        mock.patch.object(RoutedExperts, "begin", forward_only if stale else begin),
        policy_under(model_dir, layout, **R2, **changes) as policy,
    ):
        assert policy.routed is not None
        moe = [layer for layer, is_moe in enumerate(policy.info.moe_layers) if is_moe]
        own = [moe.index(layer) for layer in policy.routed.layers]
        indices, mine = own_share([copy(sample) for sample in samples])
        for index, sample in zip(indices, mine, strict=True):
            sample.routes_TLK = routes[index][:, own].to(policy.routed.dtype)
        logprobs = policy.compute_logprobs(mine)
        policy.compute_gradients(mine)
        return {
            "gradients": exported_gradients(policy),
            "logprobs": dict(zip(indices, logprobs, strict=True)),
            "left": left_behind(),
        }


def recorded(
    model_dir: Path, layout: dict[str, Any], samples: list[TrainSample], replay: bool = True, wide: bool = False,
    **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    """The experts of an old-log-prob pass by (sample, layer), then gradients of weights that choose others.

    `replay`: False takes the gradients with the experts that these weights choose. `wide`: expert numbers of two bytes,
    as with more than 256 experts.
    """
    with policy_under(model_dir, layout, **R2, **changes) as policy:
        assert policy.routed is not None
        policy.routed.dtype = torch.int16 if wide else policy.routed.dtype
        indices, mine = own_share([copy(sample) for sample in samples])
        policy.compute_logprobs(mine, reference=True)
        assert all(sample.routes_TLK is None for sample in mine) and not left_behind()
        policy.compute_logprobs(mine)
        experts: dict[tuple[int, int], torch.Tensor] = {}
        for index, sample in zip(indices, mine, strict=True):
            assert sample.routes_TLK is not None
            for place, layer in enumerate(policy.routed.layers):
                experts[index, layer] = sample.routes_TLK[:, place]
        move_routers(policy)
        if not replay:
            policy.routed = None
        policy.compute_gradients(mine)
        return {"experts": experts, "gradients": exported_gradients(policy), "left": left_behind()}


@torch.no_grad()
def move_routers(policy: Policy) -> None:
    """Change the weights of every router, by the number of its layer."""
    for chunk in policy.module_chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                generator = torch.Generator().manual_seed(module.layer_number)
                module.weight += 0.05 * torch.randn(module.weight.shape, generator=generator)


def memory_grown(model_dir: Path, steps: int, warm: int, tokens: int) -> tuple[int, int]:
    """(bytes of the experts that came after step `warm`, growth of this process's own memory since then).

    Each step replays other experts of `tokens` tokens, as they come out of the queue, in a pass and in an update.
    """
    options: dict[str, Any] = {
        "trainer__router_replay": "r3", "algorithm__old_logprobs": "trainer", "algorithm__kl": {"coef": 0.0},
        "trainer__micro_batch_tokens": tokens, "sampling__max_tokens": tokens,
    }  # fmt: skip
    generator, before, given = torch.Generator().manual_seed(0), 0, 0
    with policy_under(model_dir, {}, **options) as policy:
        assert policy.routed is not None
        spec = policy.routed.spec
        for step in range(steps):
            ids = torch.randint(1, 90, (tokens,), generator=generator).tolist()
            scores = torch.rand(tokens - 1, spec.layers, spec.experts, generator=generator)
            routes = Routes(scores.topk(spec.topk).indices.to(torch.uint8).numpy())
            made = trajectory_of(ids[1:], response_mask=[1] * (tokens - 1))
            (row,) = decode(*encode([replace(made, prompt_ids=ids[:1], routes=routes)]))
            sample = TrainSample.of(row)
            sample.set_advantage(1.0)
            policy.set_routes([sample], {row.key: row.routes})
            (sample.streams["old_logprobs"],) = policy.compute_logprobs([sample])
            policy.update([sample])
            given += routes.experts_TLK.nbytes if step > warm else 0
            if step in (warm, steps - 1):
                gc.collect()
                return_freed_memory()
                before, grown = anonymous_bytes(), anonymous_bytes() - before
    return given, grown


def left_behind() -> int:
    """Routers of this process, of whatever model, that would still record or replay, or hold experts."""
    routers = RouterReplay.global_router_replay_instances
    assert routers
    return sum(
        each.router_replay_action is not None
        or each.target_topk_idx is not None
        or each.recorded_topk_idx is not None
        or bool(each.replay_backward_list)
        for each in routers
    )
