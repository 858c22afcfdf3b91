"""Refuses what is impossible if engines and trainer take turns on the same GPUs (`rollout.share_gpus`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from megarl.config.derived.teachers import engine_teachers
from megarl.config.schema import Config

# As in `megarl.platforms.platform`, which imports torch.
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Fields of Megatron-Core with which the trainer's memory cannot be freed.
_PINNED = {
    "ddp": {"nccl_ub": "NCCL has registered that memory"},
    "transformer": dict.fromkeys(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
        "a captured graph has the addresses of memory that is given back",
    ),
}


def shared_gpus_problems(config: Config, device: str) -> Iterator[str]:
    """Yield the problems of a config whose engines share the trainer's GPUs."""
    rollout, key = config.rollout, "rollout.share_gpus"
    if not rollout.share_gpus:
        if config.weight_sync.transport == "relay":
            yield "weight_sync.transport: relay is for engines on the trainer's GPUs (rollout.share_gpus); use auto"
        return
    yield from _needs_engines(config, key)
    if rollout.load_weights:
        yield f"{key}: sleeping engines lose weights that they read from files; set rollout.load_weights: false"
    if not config.weight_sync.recompute_kv:
        yield f"{key}: a sleep empties the KV cache; set weight_sync.recompute_kv: true"
    if rollout.max_replicas not in (None, rollout.replicas):
        yield f"{key}: engines start only while the trainer's memory is free; remove rollout.max_replicas"
    if rollout.devices is not None or rollout.gpus_per_node is not None or rollout.nodes == "separate":
        yield (
            f"{key}: the engines are on the trainer's GPUs (trainer.devices, trainer.gpus_per_node); remove "
            "rollout.devices, rollout.gpus_per_node and rollout.nodes"
        )
    yield from (
        f"rollout.engine_kwargs.{name}: with {key} megarl's own worker measures what an engine holds; remove it"
        for name in ("worker_cls", "worker_extension_cls")
        if name in rollout.engine_kwargs
    )
    if engine_teachers(config.teachers):
        yield (
            f"{key}: engines of teachers cannot sleep, because the trainer has no weights for them; use teachers that "
            "the trainer's ranks hold (where: trainer)"
        )
    if config.weight_sync.transport == "nccl":
        yield f"{key}: NCCL allows only one member per GPU; set weight_sync.transport: auto"
    if device == "cuda" and (name := _expandable(os.environ)) is not None:
        yield (f"{key}: {name} has expandable segments, which another process cannot map; remove them from it")
    for target, names in _PINNED.items():
        values = getattr(config.megatron, target)
        yield from (f"megatron.{target}.{name}: {why}; remove it, or set {key}: false" for name, why in names.items()
                    if values.get(name, "none") not in (None, False, "none"))  # fmt: skip


def _expandable(environment: Mapping[str, str]) -> str | None:
    """Return the variable, if any, that gives torch's allocator expandable segments."""
    return next((name for name in _ALLOCATOR if "expandable_segments:true" in environment.get(name, "").lower()), None)


def _needs_engines(config: Config, key: str) -> Iterator[str]:
    """Yield what would need engines while the trainer has their memory."""
    mode = config.admission.mode
    if mode not in ("sync", "stream"):
        yield f"{key}: with admission.mode: {mode} engines generate while the trainer trains; use sync or stream"
    if mode == "stream" and config.admission.max_uses > 1:
        uses = f"admission.max_uses: {config.admission.max_uses}"
        yield f"{key}: with {uses} groups start while the trainer trains; remove admission.max_uses"
    if config.evaluation.concurrent:
        yield f"{key}: evaluation.concurrent needs engines while the trainer trains; remove it"
    if config.gateway.enabled:
        yield f"{key}: requests of the gateway would wait while the trainer trains; set gateway.enabled: false"
