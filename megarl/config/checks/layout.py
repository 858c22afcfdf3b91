"""Refuses layouts and passed fields that Megatron-Core cannot run or gets wrong."""

import math
from collections.abc import Iterator
from typing import Any

from megarl.config.derived.datasets import train_sets
from megarl.config.derived.logprob_passes import recomputes_old_logprobs
from megarl.config.derived.pools import trainer_layout
from megarl.config.megatron.reserved import GPU_ONLY, Target, field_problem, passes_recompute, transformer_fields
from megarl.config.schema import Config, MegatronConfig, ParallelConfig, RolloutConfig, TrainerConfig
from megarl.config.schema.agent import HARNESS
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.megatron.layout import UNEVEN_STAGES, layers_of_text

# Modules of the supported families that Megatron-Core can recompute; moe_act needs the grouped GEMM.
_RECOMPUTABLE = ("core_attn", "layernorm", "mlp", "moe", "moe_act")


def layout_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Yield the problems of the parallel layout that do not depend on the model."""
    parallel, gpus = trainer.parallel, trainer.gpus
    tensor, pipeline = parallel.tensor, parallel.pipeline
    expert_tensor = parallel.expert_tensor or tensor
    sizes = {"tensor": tensor, "context": parallel.context, "pipeline": pipeline}
    if parallel.context == 1:
        del sizes["context"]
    if gpus % math.prod(sizes.values()):
        yield (
            f"trainer.gpus: {gpus} is not a multiple of {' x '.join(f'parallel.{name}' for name in sizes)} = "
            f"{' x '.join(map(str, sizes.values()))} = {math.prod(sizes.values())}; change one of them"
        )
    if gpus % (parallel.expert * expert_tensor * pipeline):
        yield (
            f"trainer.parallel.expert: {gpus} GPUs are not a multiple of expert x expert_tensor x pipeline = "
            f"{parallel.expert} x {expert_tensor} x {pipeline}; change one of them"
        )
    if parallel.sequence and tensor == 1:
        yield "trainer.parallel.sequence: sequence parallelism needs tensor > 1; set it to false"
    if parallel.virtual_pipeline is not None and pipeline == 1:
        yield "trainer.parallel.virtual_pipeline: needs pipeline > 1; remove it"
    given = [key for key in UNEVEN_STAGES if getattr(parallel, key) is not None]
    if pipeline == 1:
        yield from (f"trainer.parallel.{key}: needs pipeline > 1; remove it" for key in given)
    elif parallel.pipeline_layout is not None and len(given) > 1:
        yield f"trainer.parallel.pipeline_layout: it sets every stage; remove {' and '.join(given[:-1])}"
    elif parallel.pipeline_layout is not None:
        try:
            layers_of_text(parallel.pipeline_layout, pipeline, parallel.virtual_pipeline or 1)
        except ValueError as error:
            yield f"trainer.parallel.pipeline_layout: {error}"


def model_problems(
    trainer: TrainerConfig, megatron: MegatronConfig, rollout: RolloutConfig, info: ModelInfo
) -> Iterator[str]:
    """Yield the parallel sizes that do not divide the sizes of this model."""
    parallel, engine = trainer.parallel, rollout.tensor_parallel
    tensor = parallel.tensor
    sizes = [("attention heads", info.heads, tensor, "trainer.parallel.tensor")]
    sizes += [("attention heads", info.heads, engine, "rollout.tensor_parallel")]
    dense = not all(info.moe_layers) or not info.moe_layers
    if dense:
        sizes += [("MLP columns", info.ffn, tensor, "trainer.parallel.tensor")]
        sizes += [("MLP columns", info.ffn, engine, "rollout.tensor_parallel")]
    if info.mla:
        latent = info.mla.kv_rank + info.mla.rotated
        sizes += [("latent key and value channels", latent, tensor, "trainer.parallel.tensor")]
        sizes += [("latent query channels", info.mla.query_rank or tensor, tensor, "trainer.parallel.tensor")]
    if info.delta:
        sizes += [("DeltaNet key heads", info.delta.key_heads, tensor, "trainer.parallel.tensor")]
        sizes += [("DeltaNet key heads", info.delta.key_heads, engine, "rollout.tensor_parallel")]
    if info.shared_ffn:
        sizes += [("shared experts' MLP columns", info.shared_ffn, tensor, "trainer.parallel.tensor")]
        sizes += [("shared experts' MLP columns", info.shared_ffn, engine, "rollout.tensor_parallel")]
    for what, size, parts, key in sizes:
        if size % parts:
            yield f"{key}: the model's {size} {what} cannot be split {parts} ways; use a divisor of {size}"
    for parts, key in ((tensor, "trainer.parallel.tensor"), (engine, "rollout.tensor_parallel")):
        if info.kv_heads % parts and parts % info.kv_heads:
            yield (
                f"{key}: {info.kv_heads} key-value heads can be neither split nor repeated over {parts} ranks; "
                f"use a divisor or a multiple of {info.kv_heads}"
            )
    if not any(layout_problems(trainer)):
        yield from _stage_problems(trainer, megatron, info)
    if info.delta and parallel.context > 1:
        yield (
            "trainer.parallel.context: the states of Gated DeltaNet layers need whole sequences; use tensor or "
            "pipeline parallelism"
        )
    if info.vision and megatron.transformer.get("apply_rope_fusion"):
        yield (
            "megatron.transformer.apply_rope_fusion: Transformer Engine's kernel would give every packed sequence the "
            "image positions of the first; remove it"
        )
    yield from _expert_problems(parallel, engine, info)


def _stage_problems(trainer: TrainerConfig, megatron: MegatronConfig, info: ModelInfo) -> Iterator[str]:
    layers = info.num_layers
    parallel, layout = trainer.parallel, trainer_layout(trainer.parallel, trainer.gpus)
    try:
        first, most = len(layout.chunk_layers(layers, 0, 0)), layout.most_layers(layers)
    except ValueError as error:
        given = [key for key in UNEVEN_STAGES if getattr(parallel, key) is not None]
        key = "virtual_pipeline" if parallel.virtual_pipeline else "pipeline"
        key = "pipeline_layout" if "pipeline_layout" in given else "first_stage_layers" if given else key
        fix = "other numbers of layers" if given else f"a divisor of {layers}, or set first_stage_layers"
        yield f"trainer.parallel.{key}: {error}; the model has {layers}: use {fix}"
    else:
        yield from _recompute_layers_problems(trainer, megatron, most)
        deepstack = len(info.vision.deepstack) if info.vision else 0
        if first < deepstack:
            yield (
                f"trainer.parallel.pipeline: the first {deepstack} layers take image features (deepstack) and must be "
                f"on the first stage, which has {first}; use fewer stages"
            )


def _recompute_layers_problems(trainer: TrainerConfig, megatron: MegatronConfig, layers: int) -> Iterator[str]:
    """Yield a problem if more layers are to be recomputed than the `layers` of a stage (or virtual_pipeline chunk)."""
    fields = transformer_fields(trainer, megatron)
    count = fields.get("recompute_num_layers")
    if fields.get("recompute_granularity") != "full" or not isinstance(count, int) or 1 <= count <= layers:
        return
    key = "trainer.recompute"
    if "recompute_num_layers" in megatron.transformer:
        key = "megatron.transformer.recompute_num_layers"
    yield (
        f"{key}: {count} layers cannot be recomputed in a stage of {layers} (a chunk's, with virtual_pipeline); use 1 "
        f"to {layers}"
    )


def _expert_problems(parallel: ParallelConfig, engine: int, info: ModelInfo) -> Iterator[str]:
    if not info.num_experts:
        if parallel.expert > 1 or parallel.expert_tensor not in (None, parallel.tensor):
            yield "trainer.parallel.expert: this model has no experts; remove expert and expert_tensor"
        return
    if info.num_experts % parallel.expert:
        yield (
            f"trainer.parallel.expert: {info.num_experts} experts cannot be split {parallel.expert} ways; use a "
            f"divisor of {info.num_experts}"
        )
    expert_tensor = parallel.expert_tensor or parallel.tensor
    if info.moe_ffn % expert_tensor:
        yield (
            f"trainer.parallel.expert_tensor: the experts' {info.moe_ffn} MLP columns cannot be split "
            f"{expert_tensor} ways; use a divisor of {info.moe_ffn}"
        )
    if info.moe_ffn % engine:
        yield (
            f"rollout.tensor_parallel: the experts' {info.moe_ffn} MLP columns cannot be split "
            f"{engine} ways; use a divisor of {info.moe_ffn}"
        )
    if parallel.tensor > 1 and not parallel.sequence:
        yield (
            "trainer.parallel.sequence: megatron-core trains a mixture of experts with tensor > 1 only with "
            "sequence parallelism; set it to true"
        )


def router_replay_problems(config: Config, info: ModelInfo) -> Iterator[str]:
    """Yield what `trainer.router_replay` cannot replay, and Megatron-Core's routing that bypasses it."""
    mode, fields = config.trainer.router_replay, config.megatron.transformer
    if mode == "none":
        return
    if not info.num_experts:
        yield "trainer.router_replay: this model has no experts; set it to none"
    if mode == "r2" and not recomputes_old_logprobs(config):
        yield (
            "trainer.router_replay: r2 replays the experts of the trainer's pass for the old log-probs, and this run "
            "makes none; set algorithm.old_logprobs=trainer"
        )
    if mode == "r3":
        yield from _engine_replay_problems(config)
    if fields.get("moe_router_fusion"):
        yield (
            "megatron.transformer.moe_router_fusion: the fused router replays nothing (trainer.router_replay); "
            "remove it"
        )
    kinds = fields.get("moe_router_load_balancing_type", "none")
    for kind in {"sinkhorn", "quantile_balancing"}.intersection([kinds] if isinstance(kinds, str) else kinds):
        yield (
            f"megatron.transformer.moe_router_load_balancing_type: routing by {kind} replays nothing "
            "(trainer.router_replay); use another"
        )


def _engine_replay_problems(config: Config) -> Iterator[str]:
    """Yield what keeps the experts of some tokens from being returned by engines or from reaching the trainer."""
    engine, key = config.rollout.engine_kwargs, "trainer.router_replay: r3"
    if engine.get("enable_prefix_caching") is False:
        yield f"rollout.engine_kwargs.enable_prefix_caching: {key} needs it true in vLLM; remove it"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if engine.get(name, 1) != 1:
            yield f"rollout.engine_kwargs.{name}: with it vLLM returns no experts ({key}); remove it"
    for name in ("worker_extension_cls", "scheduler_cls"):
        if name in engine:
            yield f"rollout.engine_kwargs.{name}: {key} uses it without a GPU; remove it"
    if config.agent.loop == HARNESS or config.agent.loop.startswith("megarl.environments."):
        yield f"{key}: responses that come through the gateway have no experts; use r2 with this agent.loop"
    if any(each.demonstrates for each in train_sets(config)):
        yield f"{key}: no engine has chosen experts for demonstrations; use r2"


def megatron_problems(trainer: TrainerConfig, megatron: MegatronConfig, device: str) -> Iterator[str]:
    """Yield a problem for each unknown, mistyped, reserved, GPU-only or unsafe field under `megatron`."""
    passed: dict[Target, dict[str, Any]] = {
        "transformer": megatron.transformer,
        "optimizer": megatron.optimizer,
        "ddp": megatron.ddp,
    }
    for target, values in passed.items():
        for name, value in values.items():
            wrong = field_problem(target, name, value)
            if wrong is not None:
                yield wrong
            elif device == "cpu" and value and name in GPU_ONLY[target]:
                yield f"megatron.{target}.{name}: needs a GPU, and this run would have none; remove it"
    yield from _unsafe_fields(trainer, megatron, device)
    optimizer = megatron.optimizer.get("optimizer", "adam")
    if optimizer != "adam":
        yield f"megatron.optimizer.optimizer: {optimizer!r} cannot be saved and resumed; use adam"
    if megatron.ddp.get("overlap_param_gather") and not trainer.optimizer.distributed:
        yield (
            "megatron.ddp.overlap_param_gather: there is no gather without the distributed optimizer; set "
            "trainer.optimizer.distributed=true or remove it"
        )
    if megatron.ddp.get("overlap_param_gather") and not megatron.ddp.get("overlap_grad_reduce", True):
        yield "megatron.ddp.overlap_param_gather: megatron-core needs overlap_grad_reduce with it; do not turn that off"


def _unsafe_fields(trainer: TrainerConfig, megatron: MegatronConfig, device: str) -> Iterator[str]:
    """Yield the settings with which megatron-core computes wrong results or fails in the first step."""
    fields, parallel = megatron.transformer, trainer.parallel
    interleaved = parallel.virtual_pipeline is not None
    # Without the overlap, PP=2 posts two sends to one peer and confuses them: gradients are silently wrong. Larger PP
    # fails on shapes if micro-batches differ in length.
    for name, wanted in (("overlap_p2p_comm", True), ("batch_p2p_comm", False)):
        if interleaved and name in fields and fields[name] is not wanted:
            yield (
                f"megatron.transformer.{name}: must be {str(wanted).lower()} with virtual_pipeline: megatron-core "
                "otherwise confuses the chunks' activations, and gradients are wrong without an error; remove it"
            )
    if not interleaved and fields.get("overlap_p2p_comm"):
        yield "megatron.transformer.overlap_p2p_comm: works only with trainer.parallel.virtual_pipeline; remove it"
    if fields.get("moe_token_dispatcher_type") == "allgather":
        yield (
            "megatron.transformer.moe_token_dispatcher_type: allgather cannot handle packed micro-batches of "
            "different lengths (variable_seq_lengths, which dense models need as well); use alltoall or remove it"
        )
    if fields.get("moe_token_dispatcher_type") == "flex" and device == "cpu":
        yield "megatron.transformer.moe_token_dispatcher_type: flex needs a GPU; use alltoall"
    yield from _recompute_problems(fields, device)
    if trainer.recompute != "auto" and passes_recompute(megatron):
        yield "trainer.recompute: megatron.transformer has recompute fields as well; remove one of the two"
    if device == "cpu" and parallel.expert > 1 and (parallel.expert_tensor or parallel.tensor) > 1:
        yield (
            "trainer.parallel.expert_tensor: without GPUs megatron-core's uneven all-gather fails for expert > 1 "
            "and expert_tensor > 1 (gloo: invalid tensor size); set expert_tensor=1"
        )


def _recompute_problems(fields: dict[str, Any], device: str) -> Iterator[str]:
    """Yield the problems of the recompute settings."""
    modules = fields.get("recompute_modules")
    if isinstance(modules, list):
        if unknown := [each for each in modules if each not in _RECOMPUTABLE]:
            yield (
                f"megatron.transformer.recompute_modules: {unknown} cannot be recomputed in these models; choose "
                f"from {', '.join(_RECOMPUTABLE)}"
            )
        if fields.get("recompute_granularity") != "selective":
            yield "megatron.transformer.recompute_modules: only with recompute_granularity: selective; add it"
        if device == "cpu" and "moe_act" in modules:
            yield (
                "megatron.transformer.recompute_modules: moe_act needs the grouped GEMM (a GPU); remove it or use moe"
            )
    if fields.get("recompute_granularity") == "full" and fields.get("recompute_method") is None:
        yield "megatron.transformer.recompute_method: set it to uniform or block with recompute_granularity: full"
    if fields.get("recompute_granularity") == "full" and fields.get("recompute_num_layers") is None:
        yield "megatron.transformer.recompute_num_layers: set it (e.g. 1) with recompute_granularity: full"
    if fields.get("recompute_method") is not None and fields.get("recompute_granularity") != "full":
        yield "megatron.transformer.recompute_method: only with recompute_granularity: full; remove it"
