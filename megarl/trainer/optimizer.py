"""Megatron's DDP wrapper, optimizer and schedule from the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

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

from megarl.config.schema import Config
from megarl.models.shards import persistent_buffers


class NonFiniteError(FloatingPointError):
    """Loss or gradient is NaN or infinite; raised on all ranks before any weight has changed."""


def precision_wrap(chunk: GPTModel) -> torch.nn.Module:
    """Float16Module for bf16 (its buffers such as the routers' expert bias stay fp32), the chunk itself for fp32."""
    if not chunk.config.bf16:
        return chunk
    kept = {name: buffer for name, buffer in persistent_buffers(chunk) if buffer.dtype == torch.float32}
    wrapped = Float16Module(chunk.config, chunk)
    for name, buffer in kept.items():
        # Megatron makes the expert bias fp32 again in its next forward, but of the values that bf16 has rounded.
        owner, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(owner), attribute, buffer)
    return wrapped


def data_parallel_wrap(
    config: Config, tf_config: TransformerConfig, chunks: Sequence[torch.nn.Module]
) -> list[DistributedDataParallel]:
    """Wrap in Megatron's DDP with fp32 gradient sums, and hook gradient scale and finalisation into the schedules."""
    ddp_config = DistributedDataParallelConfig(
        **{
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": config.trainer.optimizer.distributed,
            **config.megatron.ddp,
        }
    )
    wrapped = [
        # Later chunks' gradients come early in backward: Megatron buckets the first chunk only.
        DistributedDataParallel(tf_config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    tf_config.grad_scale_func = partial(torch.mul, aux_loss_scale(tf_config))
    tf_config.finalize_model_grads_func = finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        tf_config.no_sync_func = _one_or_list([chunk.no_sync for chunk in wrapped])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        tf_config.param_sync_func = _one_or_list([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def aux_loss_scale(tf_config: TransformerConfig) -> int:
    """Factor on all gradients that undoes what tensor ranks take off the routers' auxiliary losses.

    Under sequence parallelism each of them weighs the losses by its part of the micro-batch's tokens, 1 / TP, which
    need not be whole; Megatron then divides by a whole number, so that has to count all tokens.
    """
    return int(tf_config.tensor_model_parallel_size) if tf_config.sequence_parallel else 1


def build_optimizer(config: Config, chunks: Sequence[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's (distributed) Adam with fp32 master weights; refuses to step on a non-finite gradient norm."""
    knobs = config.trainer.optimizer
    bf16 = config.trainer.precision == "bf16"
    fields: dict[str, Any] = {
        "optimizer": "adam",
        "lr": knobs.lr,
        "min_lr": min(knobs.min_lr, knobs.lr),
        "weight_decay": knobs.weight_decay,
        "adam_beta1": knobs.betas[0],
        "adam_beta2": knobs.betas[1],
        "adam_eps": knobs.eps,
        "clip_grad": knobs.clip_grad,
        "bf16": bf16,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "use_distributed_optimizer": chunks[0].ddp_config.use_distributed_optimizer,
        "overlap_param_gather": chunks[0].ddp_config.overlap_param_gather,
        **config.megatron.optimizer,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**fields), list(chunks), use_gloo_process_groups=False)
    _refuse_non_finite(optimizer)
    return optimizer


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Learning rate by updates (a step has `trainer.mini_batches` of them). Step it before each update.

    So the first update has lr / warm-up length, not 0. Raises ValueError when the warm-up is as long as the run.
    """
    knobs = config.trainer.optimizer
    updates = config.run.steps * config.trainer.mini_batches
    warmup = knobs.warmup_steps * config.trainer.mini_batches
    if warmup and warmup >= updates:
        raise ValueError(
            f"trainer.optimizer.warmup_steps={knobs.warmup_steps} must be below run.steps={config.run.steps}"
        )
    if knobs.min_lr > knobs.lr:
        raise ValueError(f"trainer.optimizer.min_lr={knobs.min_lr} is above lr={knobs.lr}")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=knobs.lr,
        min_lr=knobs.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=updates,
        lr_decay_style=knobs.schedule,
        start_wd=knobs.weight_decay,
        end_wd=knobs.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def _refuse_non_finite(optimizer: MegatronOptimizer) -> None:
    """`step` asks for the norm after reducing and before changing anything: the one place to stop in time."""
    original = optimizer.get_grad_norm

    def get_grad_norm() -> float:
        norm = float(original())
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient norm is {norm}; no weight was changed")
        return norm

    optimizer.get_grad_norm = get_grad_norm


def _one_or_list(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]
