"""Minimal patches for defects of Megatron-Core that no config check can avoid.

They apply on every platform. Each function is named after its defect; `PATCHES` lists them. Files and lines are those
of 0.19.2, the supported version (https://github.com/NVIDIA/Megatron-LM/tree/core_v0.19.2/megatron/core). A patch keeps
the original function as `__wrapped__`, with which tests reproduce the defect.
"""

import functools
import queue
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import mappings, random
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


def apply() -> None:
    """Apply all patches. Called once, by `platforms.activate()`."""
    for patch in PATCHES:
        patch()


def all_to_all_split_sizes() -> None:
    """Convert split sizes to lists before `all_to_all`.

    moe_utils.py:1184 converts only CUDA tensors. Without CUDA they remain tensors, for which all_to_all_single raises
    TypeError: EP > 1 cannot run.
    """
    original = mappings.all_to_all

    def as_list(sizes: Sequence[int] | Tensor | None) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    @functools.wraps(original)
    def all_to_all(
        group: ProcessGroup,
        input_: Tensor,
        output_split_sizes_: Sequence[int] | Tensor | None = None,
        input_split_sizes: Sequence[int] | Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        return original(group, input_, as_list(output_split_sizes_), as_list(input_split_sizes), *args, **kwargs)

    mappings.all_to_all = all_to_all
    rebind("all_to_all", original, all_to_all)


def recompute_without_fp8() -> None:
    """Pass `fp8=None` instead of False to `CheckpointWithoutOutput`.

    random.py:740 tests `fp8 is not None`, so False counts as on: a NameError in selective recompute without TE.
    """
    original = CheckpointWithoutOutput.__init__

    @functools.wraps(original)
    def init(self: CheckpointWithoutOutput, fp8: bool | None = None) -> None:
        original(self, fp8 or None)

    CheckpointWithoutOutput.__init__ = init


def recompute_compiles_at_run_time() -> None:
    """Copy a recomputed output instead of compiling a C++ function that shares its memory.

    random.py:69 (`_get_share_storage`): the first backward pass with selective recompute compiles an extension. That
    needs a compiler on every node and takes minutes on a busy one. If a rank is killed while it compiles, the others
    wait forever for its lock file.
    """
    original = random._get_share_storage

    def share_storage(output: Tensor, recomputed: Tensor) -> None:
        source = recomputed.untyped_storage()
        output.untyped_storage().resize_(source.size())
        output.untyped_storage().copy_(source)

    @functools.wraps(original)
    def get_share_storage() -> Callable[[Tensor, Tensor], None]:
        return share_storage

    random._get_share_storage = get_share_storage


def aux_loss_counts_of_padding() -> None:
    """Correct the token counts that scale the auxiliary losses in micro-batches with padding.

    moe_utils.py:275: for a micro-batch of only padding the auxiliary loss divides 0 by 0 tokens, and every gradient
    becomes NaN; here the total is at least 1. The function also reduces over the group in place, so `local`, the weight
    of each rank's part of the loss, counts the whole group's tokens. The parts of one sum need equal weights, so here
    it is the mean over the group.
    """
    original = moe_utils.get_tokens_per_expert_and_token_count

    @functools.wraps(original)
    def counts(
        routing_map: Tensor, reduce_group: ProcessGroup, topk: int | None = None, with_padding_mask: bool = False
    ) -> tuple[Tensor, Tensor | int, Tensor | int]:
        per_expert, local, total = original(routing_map, reduce_group, topk, with_padding_mask)
        if not with_padding_mask:
            return per_expert, local, total
        return per_expert, total / reduce_group.size(), total.clamp(min=1)

    moe_utils.get_tokens_per_expert_and_token_count = counts
    rebind("get_tokens_per_expert_and_token_count", original, counts)


def expert_bias_padding_mask_shape() -> None:
    """Add a second axis to the padding mask of `_apply_expert_bias`.

    router.py:738 combines a map [tokens, experts] with a mask [tokens]: an error, or the wrong axis if sizes match.
    """
    original = TopKRouter._apply_expert_bias

    @functools.wraps(original)
    def apply_expert_bias(self: TopKRouter, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        original(self, routing_map, None if padding_mask is None else padding_mask[:, None])

    TopKRouter._apply_expert_bias = apply_expert_bias


def write_results_need_no_manager() -> None:
    """Use a plain queue for the results of a save.

    filesystem_async.py:53: every save starts a manager process for one queue, which survives a killed rank. The process
    is spawned, so it runs an entry script without an import guard again. megarl writes only in the rank's process
    (`checkpoint/save/writer.py`, or Megatron-Core's synchronous save), where a plain queue is enough.
    """
    original = filesystem_async.get_write_results_queue

    @functools.wraps(original)
    def get_write_results_queue() -> queue.Queue[Any]:  # of torch's write results or exceptions
        return queue.Queue()

    filesystem_async.get_write_results_queue = get_write_results_queue


def mla_rotated_key_gradient_is_partial() -> None:
    """Sum the gradient of the shared rotated key over the tensor ranks.

    multi_latent_attention.py:749: with column-parallel down projections (as in the local spec) and TP > 1, every rank
    rotates the whole shared key, but back-propagates only its heads' part: silently wrong gradients. The patch gathers
    the projection's output, and passes its key part through a region that sums gradients. Megatron's code then takes
    its branch for replicated projections, which is correct.
    """
    original = MLASelfAttention.__init__

    def gathered(config: TransformerConfig, output: Tensor) -> Tensor:
        whole = mappings.gather_from_tensor_model_parallel_region(output)
        if config.sequence_parallel:
            return mappings.scatter_to_sequence_parallel_region(whole)
        latent, key = whole.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        key = mappings.copy_to_tensor_model_parallel_region(key)
        if key.requires_grad:
            key.register_hook(Tensor.contiguous)  # mappings.py `_reduce` sums a copy of a non-contiguous tensor
        return torch.cat([latent, key], dim=-1)

    @functools.wraps(original)
    def init(self: MLASelfAttention, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        original(self, config, *args, **kwargs)
        projection = self.linear_kv_down_proj
        if projection.weight.shape[0] != config.kv_lora_rank + config.qk_pos_emb_head_dim:
            projection.register_forward_hook(lambda module, args, result: (gathered(config, result[0]), result[1]))

    MLASelfAttention.__init__ = init


def mla_query_has_no_norm_without_compression() -> None:
    """Build latent attention's query projection as in the layer spec, if queries are not compressed.

    mla_qk_norm_config.py:148: with `qk_layernorm`, which the norm of keys and values needs, it uses Transformer
    Engine's fused norm and projection instead. Models such as Moonlight have no such norm (reported as
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5261), and without Transformer Engine it is an error.
    """
    original = QKNormConfigResolver._mla_fused_linear_or_default

    @functools.wraps(original)
    def choose(self: QKNormConfigResolver, module_spec: object, module_name: str) -> object:
        if module_name == "linear_q_proj" and module_spec is not None:
            return module_spec
        return original(self, module_spec, module_name)

    QKNormConfigResolver._mla_fused_linear_or_default = choose


def rebind(name: str, original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Set `replacement` in every Megatron module that imported `original` by name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.core") and getattr(module, name, None) is original:
            setattr(module, name, replacement)


PATCHES: tuple[Callable[[], None], ...] = (
    all_to_all_split_sizes,
    recompute_without_fp8,
    recompute_compiles_at_run_time,
    aux_loss_counts_of_padding,
    expert_bias_padding_mask_shape,
    write_results_need_no_manager,
    mla_rotated_key_gradient_is_partial,
    mla_query_has_no_norm_without_compression,
)
