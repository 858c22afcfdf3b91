"""Megatron's defects, shown on a rank of a test world: each function returns (without the patch, with it)."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

from megarl.models.architecture.architecture import LatentAttention, ModelInfo
from megarl.models.megatron.build_model import build_model, transformer_config
from megarl.models.megatron.layout import Layout
from tests.support.ranks.models.layouts import make_layout, use_layout

INFO = ModelInfo(
    family="qwen3",
    num_layers=1,
    hidden=16,
    ffn=16,
    heads=2,
    kv_heads=2,
    head_dim=8,
    vocab_size=32,
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    max_positions=64,
)


def attempt(function: Callable[[], Any]) -> Any:
    """The function's value, or the name of its exception."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__


def build(layout: Layout, bucket_size: int | None = None, **overrides: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = transformer_config(INFO, layout, "fp32", overrides)
    (chunk,) = build_model(INFO, config, layout)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, bucket_size=bucket_size, overlap_grad_reduce=bool(bucket_size)
    )
    model = DistributedDataParallel(config, ddp, chunk)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, bf16=False, clip_grad=0.0),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=5, max_seqlen_kv=5
    )
    tokens = torch.arange(8)[None]
    losses = []
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        logits = model(tokens, tokens, None, packed_seq_params=packed)
        loss = torch.nn.functional.cross_entropy(logits[0].float(), tokens[0])
        loss.backward()
        model.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def unpatched(owner: Any, name: str) -> Iterator[None]:
    with patch.object(owner, name, getattr(owner, name).__wrapped__):
        yield


def manager_processes() -> tuple[int, int]:
    """Child processes that a synchronous save leaves behind."""

    def children() -> int:
        before = set(psutil.Process().children())
        with tempfile.TemporaryDirectory() as path, use_layout(make_layout()) as layout:
            (chunk,) = build_model(INFO, transformer_config(INFO, layout, "fp32", {}), layout)
            dist_checkpointing.save(chunk.sharded_state_dict(), path)
        new = set(psutil.Process().children()) - before
        for process in new:
            process.kill()
        filesystem_async._results_queue = None
        return len(new)

    with unpatched(filesystem_async, "get_write_results_queue"):
        before = children()
    return before, children()


def all_to_all_with_tensors() -> tuple[Any, Any]:
    """Rank r sends r + 1 rows to each rank."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    inputs = torch.full((size,), rank + 1)
    outputs = torch.arange(1, size + 1)
    rows = torch.arange(inputs.sum())[:, None].float()
    group = torch.distributed.group.WORLD
    original = mappings.all_to_all.__wrapped__
    return (
        attempt(lambda: original(group, rows, outputs, inputs)),
        attempt(lambda: mappings.all_to_all(group, rows, outputs, inputs).shape[0]),
    )


def uneven_collectives() -> tuple[Any, Any]:
    """Gather 1 and 3 rows, and reduce-scatter them back; originals first."""
    rank = torch.distributed.get_rank()
    sizes, group = [1, 3], torch.distributed.group.WORLD
    own = torch.full((sizes[rank], 2), float(rank + 1))

    def there_and_back(gather: Any, scatter: Any) -> Any:
        full = gather(own, group, sizes)
        return full[:, 0].tolist(), scatter(full, group, sizes)[:, 0].tolist()

    gather, scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
    return (
        attempt(lambda: there_and_back(gather.__wrapped__, scatter.__wrapped__)),
        attempt(lambda: there_and_back(gather, scatter)),
    )


def norm_recompute() -> tuple[Any, Any, Any]:
    """Losses with selective recompute of the norms: unpatched, patched, and without recompute."""
    with use_layout(make_layout(tensor=2)) as layout:
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
        with unpatched(CheckpointWithoutOutput, "__init__"):
            before = attempt(lambda: train(*build(layout, **recompute), 2))
        after = train(*build(layout, **recompute), 2)
        return before, after, train(*build(layout), 2)


def compiling_recompute() -> tuple[Any, Any]:
    """Losses with selective recompute of the norms on a machine that cannot compile: unpatched, and patched."""
    from megatron.core.tensor_parallel import random

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with use_layout(make_layout()) as layout, patch.object(random, "load_inline", side_effect=OSError("no compiler")):
        with unpatched(random, "_get_share_storage"):
            before = attempt(lambda: train(*build(layout, **recompute), 1))
        return before, attempt(lambda: train(*build(layout, **recompute), 1))


def tracker_states() -> Any:
    """The emulated CUDA random state: forking draws from the tracker and leaves the outer sequence alone."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with use_layout(make_layout(tensor=2)):
        torch.cuda.manual_seed(7)
        plain = torch.rand(2).tolist()
        torch.cuda.manual_seed(7)
        with get_cuda_rng_tracker().fork():
            first = torch.rand(2).tolist()
        with get_cuda_rng_tracker().fork():
            second = torch.rand(2).tolist()
        after = torch.rand(2).tolist()
        assert parallel_state.get_tensor_model_parallel_world_size() == 2
        return plain, after, first, second


LATENT = replace(
    INFO,
    family="deepseek_v3",
    head_dim=24,
    qk_norm=False,
    mla=LatentAttention(query_rank=8, kv_rank=16, plain=16, rotated=8, value=12, norm_eps=1e-6),
)


def _latent_gradient(**sizes: Any) -> torch.Tensor:
    """Gradient of the compressing key/value projection, this rank's rows."""
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=5, max_seqlen_kv=5
    )
    tokens = torch.arange(8)[None]
    with use_layout(make_layout(**sizes)) as layout:
        (chunk,) = build_model(LATENT, transformer_config(LATENT, layout, "fp32"), layout)
        logits = gather_from_tensor_model_parallel_region(chunk(tokens, tokens, None, packed_seq_params=packed))
        torch.nn.functional.cross_entropy(logits[0].float(), tokens[0]).backward()
        return chunk.decoder.layers[0].self_attention.linear_kv_down_proj.weight.grad


def latent_attention_defects(sequence: bool) -> tuple[float, float]:
    """Relative gradient errors under TP 2, without and with the patch."""
    whole = _latent_gradient()
    expected = whole.chunk(2)[torch.distributed.get_rank()]

    def error() -> float:
        return float((_latent_gradient(tensor=2, sequence=sequence) - expected).norm() / expected.norm())

    attention = multi_latent_attention.MLASelfAttention
    with patch.object(attention, "__init__", attention.__init__.__wrapped__):
        before = error()
    return before, error()


def uncompressed_queries() -> tuple[Any, Any]:
    """Names of the query projection's parameters if queries are not compressed, without and with the patch."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    assert LATENT.mla is not None
    info = replace(LATENT, mla=replace(LATENT.mla, query_rank=None))

    def names() -> list[str]:
        with use_layout(make_layout()) as layout:
            (chunk,) = build_model(info, transformer_config(info, layout, "fp32"), layout)
            return [name for name, _ in chunk.decoder.layers[0].self_attention.linear_q_proj.named_parameters()]

    with unpatched(QKNormConfigResolver, "_mla_fused_linear_or_default"):
        before = attempt(names)
    return before, names()


def padding_only_counts() -> tuple[torch.Tensor, torch.Tensor]:
    """Auxiliary loss of a micro-batch of padding, without and with the patch."""
    nothing = torch.zeros(3, 4)
    losses = []
    for counts in (
        moe_utils.get_tokens_per_expert_and_token_count.__wrapped__,
        moe_utils.get_tokens_per_expert_and_token_count,
    ):
        per_expert, _, total = counts(nothing.bool(), torch.distributed.group.WORLD, 2, with_padding_mask=True)
        losses.append(moe_utils.switch_load_balancing_loss_func(nothing, per_expert, total, 2, 4, 1.0))
    return losses[0], losses[1]


def padded_counts() -> list[tuple[float, float]]:
    """(tokens that weigh this rank's loss, all tokens) of two ranks with 1 and 2 tokens, without and with the patch."""
    results = []
    for counts in (
        moe_utils.get_tokens_per_expert_and_token_count.__wrapped__,
        moe_utils.get_tokens_per_expert_and_token_count,
    ):
        valid = torch.arange(2)[:, None] <= torch.distributed.get_rank()
        routing = torch.tensor([[True, True, False], [False, True, True]]) & valid
        _, local, total = counts(routing, torch.distributed.group.WORLD, 2, with_padding_mask=True)
        results.append((float(local), float(total)))
    return results


def expert_bias_of_padding() -> tuple[str, list[float]]:
    """Tokens counted per expert where one of two tokens is padding, without and with the patch."""
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(3))
    routing = torch.tensor([[True, True, False], [False, True, True]])
    padding = torch.tensor([False, True])
    try:
        TopKRouter._apply_expert_bias.__wrapped__(router, routing, padding)
        unpatched = "no error"
    except RuntimeError as error:
        unpatched = str(error)
    router.local_tokens_per_expert.zero_()
    TopKRouter._apply_expert_bias(router, routing, padding)
    return unpatched, router.local_tokens_per_expert.tolist()
