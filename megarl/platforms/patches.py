"""Defects of megatron-core 0.16.1 that a config check cannot avoid: one smallest patch each, on every
platform.

Each function names the defect; `PATCHES` lists them. A patch keeps the original under `__wrapped__`, which is
how the tests show the defect. When the pin moves, re-check each against the new source.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable
from typing import Any

import torch


def apply() -> None:
    """Apply every patch to the imported Megatron-Core. Called once, by `platforms.activate()`."""
    for patch in PATCHES:
        patch()


def router_gemm_without_te() -> None:
    """moe_utils.py:38 imports `te_general_gemm` under try, but 1192 reads it always: NameError without TE."""
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def all_to_all_split_sizes() -> None:
    """token_dispatcher.py:875 turns split sizes into arrays only if they are CUDA tensors.

    Without CUDA they stay tensors, which all_to_all_single refuses (TypeError): EP > 1 cannot run.
    """
    from megatron.core.tensor_parallel import mappings

    original = mappings.all_to_all

    def as_list(sizes: Any) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    @functools.wraps(original)
    def all_to_all(
        group: Any, input_: torch.Tensor, output_split_sizes_: Any = None, input_split_sizes: Any = None
    ) -> torch.Tensor:
        return original(group, input_, as_list(output_split_sizes_), as_list(input_split_sizes))

    mappings.all_to_all = all_to_all
    _rebind("all_to_all", original, all_to_all)


def adam_step_is_shared() -> None:
    """distrib_optimizer.py `load_state_dict` gives all parameters ONE `step` tensor (torch Adam, no TE or
    Apex).

    torch increments it once per parameter, so Adam's bias correction is wrong after every resume.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        original(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()

    DistributedOptimizer.load_state_dict = load_state_dict


def dp_reshardable_load_needs_no_grad() -> None:
    """distrib_optimizer.py:1772 copies into fp32 parameters that require grad: raises for fp32 models."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.load_parameter_state_from_dp_reshardable
    DistributedOptimizer.load_parameter_state_from_dp_reshardable = functools.wraps(original)(torch.no_grad()(original))


def adam_step_is_not_parameter_state() -> None:
    """distrib_optimizer.py `_set_main_param_and_optimizer_states` copies `step` with the tensors (torch Adam).

    `step` comes from the parameter groups. The fully reshardable format leaves it out (KeyError); in the DP
    reshardable one it is the loading optimizer's own, so a fresh one silently restarts at 0.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(original)
    def set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state.get(self.optimizer.param_groups[group]["params"][order], {})
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        original(self, model_param, tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def fresh_optimizer_has_no_state_to_load_into() -> None:
    """distrib_optimizer.py:643: `sharded_state_dict(is_loading=True)` asserts on an optimizer that never
    stepped.

    With torch Adam the state must exist before its shapes can be asked for: prime it with zeros.
    """
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.sharded_state_dict

    @functools.wraps(original)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and not distrib_optimizer.HAVE_APEX_OR_TE and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    self.optimizer.state[param] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(param, requires_grad=False),
                        "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
                    }
        return original(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    DistributedOptimizer.sharded_state_dict = sharded_state_dict


def recompute_without_fp8() -> None:
    """random.py:636 takes `fp8=False` for on (`is not None`): NameError in selective recompute without TE."""
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    original = CheckpointWithoutOutput.__init__

    @functools.wraps(original)
    def init(self: Any, fp8: Any = None) -> None:
        original(self, fp8 or None)

    CheckpointWithoutOutput.__init__ = init


def aux_loss_counts_of_padding() -> None:
    """moe_utils.py:227: with nothing but padding the auxiliary loss divides 0 by 0 tokens: NaN in every gradient.

    Also, the group's sum is made in place, so that `local`, with which each rank weighs its part of the loss, is all of
    the group's tokens. A rank's own would be no better: parts of one sum need equal weights. It becomes the mean.
    """
    from megatron.core.transformer.moe import moe_utils

    original = moe_utils.get_tokens_per_expert_and_token_count

    @functools.wraps(original)
    def counts(
        routing_map: torch.Tensor, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
    ) -> tuple[torch.Tensor, Any, Any]:
        per_expert, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
        if not with_padding_mask:
            return per_expert, local, total
        return per_expert, total / reduce_group.size(), total.clamp(min=1)

    moe_utils.get_tokens_per_expert_and_token_count = counts
    _rebind("get_tokens_per_expert_and_token_count", original, counts)


def expert_bias_padding_mask_shape() -> None:
    """router.py:542 combines [tokens, experts] with a [tokens] mask: an error, or the wrong axis if both are equal."""
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter._apply_expert_bias

    @functools.wraps(original)
    def apply_expert_bias(self: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        original(self, routing_map, None if padding_mask is None else padding_mask[:, None])

    TopKRouter._apply_expert_bias = apply_expert_bias


def write_results_need_no_manager() -> None:
    """filesystem_async.py:54: every save starts a manager process for one queue; a killed rank leaves it running.

    Also, it is spawned: an entry script that is not import-guarded runs again in it. All writing here is done in the
    rank's own process (`checkpoint/save/writer.py`, or Megatron-Core's synchronous save), where a plain queue does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    original = filesystem_async._get_write_results_queue

    @functools.wraps(original)
    def get_write_results_queue() -> Any:
        return queue.Queue()

    filesystem_async._get_write_results_queue = get_write_results_queue


def mla_without_te() -> None:
    """multi_latent_attention.py:55 takes a successful import for TE's presence, but without TE the names are mocks.

    `isinstance(…, mock)` is then a TypeError: latent attention cannot be built.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.transformer import multi_latent_attention

    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE


def mla_rotated_key_gradient_is_partial() -> None:
    """multi_latent_attention.py:490: with column-parallel down projections (the local spec's) and TP > 1, every rank
    rotates the whole shared key but back-propagates only its own heads' part: wrong gradients without an error.

    The projection's output is gathered here instead, its key part through a region that sums gradients; what follows
    then takes the branch for replicated projections, which is right.
    """
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    original = MLASelfAttention.__init__

    def gathered(config: Any, output: torch.Tensor) -> torch.Tensor:
        whole = mappings.gather_from_tensor_model_parallel_region(output)
        if config.sequence_parallel:
            return mappings.scatter_to_sequence_parallel_region(whole)
        latent, key = whole.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        key = mappings.copy_to_tensor_model_parallel_region(key)
        if key.requires_grad:
            key.register_hook(torch.Tensor.contiguous)  # mappings.py `_reduce` sums a copy of what is not contiguous
        return torch.cat([latent, key], dim=-1)

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        projection = self.linear_kv_down_proj
        if projection.weight.shape[0] != config.kv_lora_rank + config.qk_pos_emb_head_dim:
            projection.register_forward_hook(lambda module, args, result: (gathered(config, result[0]), result[1]))

    MLASelfAttention.__init__ = init


def _rebind(name: str, original: Any, replacement: Any) -> None:
    """Point every Megatron module that imported `original` by name at `replacement`."""
    import sys

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.core") and getattr(module, name, None) is original:
            setattr(module, name, replacement)


PATCHES: tuple[Callable[[], None], ...] = (
    router_gemm_without_te,
    all_to_all_split_sizes,
    adam_step_is_shared,
    dp_reshardable_load_needs_no_grad,
    adam_step_is_not_parameter_state,
    fresh_optimizer_has_no_state_to_load_into,
    recompute_without_fp8,
    aux_loss_counts_of_padding,
    expert_bias_padding_mask_shape,
    write_results_need_no_manager,
    mla_without_te,
    mla_rotated_key_gradient_is_partial,
)
