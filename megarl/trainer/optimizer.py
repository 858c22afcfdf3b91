"""Builds Megatron's DDP wrapper, optimizer and learning-rate schedule from the configuration."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.schema import OptimizerConfig as OptimizerSection
from megarl.config.schema import TrainerConfig

T = TypeVar("T")


class StepRefused(Exception):  # noqa: N818
    """A batch must not be trained on. Raised on all ranks, before a weight changes.

    `updates`: earlier updates of the same step.
    """

    updates = 0


class NonFiniteError(StepRefused, FloatingPointError):
    """A loss, a gradient norm or a log-prob is NaN or infinite."""


def precision_wrap(chunk: GPTModel) -> torch.nn.Module:
    """Wrap a bf16 chunk in Float16Module; return an fp32 chunk as it is.

    fp32 parameters and buffers, such as the routers' expert bias and a vision tower's frequencies, keep dtype and
    values.
    """
    if not chunk.config.bf16:
        return chunk
    kept = {name: buffer for name, buffer in chunk.named_buffers() if buffer.dtype == torch.float32}
    wide = [(parameter, parameter.data) for parameter in chunk.parameters() if parameter.dtype == torch.float32]
    wrapped = Float16Module(chunk.config, chunk)
    for parameter, data in wide:
        parameter.data = data
    for name, buffer in kept.items():
        # Megatron's next forward converts the expert bias back to fp32, but from values rounded to bf16.
        owner, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(owner), attribute, buffer)
    return wrapped


def data_parallel_wrap(
    fields: Mapping[str, Any], tf_config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """Wrap each chunk in Megatron's DDP. `fields`: of its config, from `ddp_fields`.

    Also sets the functions in `tf_config` with which pipeline schedules reduce and finalise gradients, and lets
    Transformer Engine's modules accumulate weight gradients in DDP's buffers.
    """
    ddp_config = DistributedDataParallelConfig(**fields)
    wrapped = [
        # As in Megatron, only the first chunk has buckets: later chunks' gradients are ready early in backward.
        DistributedDataParallel(tf_config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    fuse_weight_gradients(wrapped)
    tf_config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        tf_config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        tf_config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def fuse_weight_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Make Transformer Engine's linear modules add weight gradients to `main_grad` inside their matrix products.

    Otherwise each product writes a bf16 gradient, which DDP adds to the fp32 buffer in another pass over memory, for
    every expert and micro-batch. Megatron's switch, `gradient_accumulation_fusion`, cannot be used: it also covers the
    output layer, which then raises without Apex (tensor_parallel/layers.py:924). Only Transformer Engine's modules have
    the attribute.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True


def build_optimizer(
    trainer: TrainerConfig, own: Mapping[str, Any], chunks: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """Build Megatron's (distributed) Adam with fp32 main weights. `own`: the user's fields of its config.

    Its `step` raises NonFiniteError if the gradient norm is not finite, before any weight changes.
    """
    settings = trainer.optimizer
    bf16 = trainer.precision == "bf16"
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": min(settings.min_lr, settings.lr),
        "weight_decay": settings.weight_decay,
        "adam_beta1": settings.betas[0],
        "adam_beta2": settings.betas[1],
        "adam_eps": settings.eps,
        "clip_grad": settings.clip_grad,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
        "overlap_param_gather": chunks[0].ddp_config.overlap_param_gather,
        **own,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**fields), list(chunks), use_gloo_process_groups=False)
    _refuse_non_finite(optimizer)
    return optimizer


def build_scheduler(settings: OptimizerSection, updates: int, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Build the learning-rate schedule of a run of `updates` updates; warm-up and decay count updates.

    Step it before each update, so that the first has lr / warm-up updates, not 0.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=updates,
        lr_decay_style=settings.schedule,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def _refuse_non_finite(optimizer: MegatronOptimizer) -> None:
    """Make `get_grad_norm` raise NonFiniteError: `step` calls it after the reduction, before any weight changes."""
    original = optimizer.get_grad_norm

    def get_grad_norm() -> float:
        norm = float(original())
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}; no weight was changed")
        return norm

    optimizer.get_grad_norm = get_grad_norm


def _one_or_list(functions: list[T]) -> list[T] | T:
    """Return the only function, or all of them: Megatron's schedules take one per model chunk."""
    return functions if len(functions) > 1 else functions[0]
