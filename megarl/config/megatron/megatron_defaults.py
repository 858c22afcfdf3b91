"""Fields of Megatron's configs for which megarl has other defaults than Megatron-Core; passed fields replace them."""

from __future__ import annotations

from typing import Any

from megarl.config.schema import Config, Recompute

__all__ = ["Recompute", "ddp_fields", "passes_recompute", "transformer_fields"]


def ddp_fields(config: Config) -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig: megarl's defaults, replaced by those of `megatron.ddp`.

    Gradients are summed in fp32. Their reduction overlaps the backward pass, and with the distributed optimizer the
    gather of new weights overlaps the next forward pass. Megatron-Core 0.16.1 allows the first with both optimizers,
    the second only together with the first and with the distributed one (param_and_grad_buffer.py:272, 318).
    """
    passed = config.megatron.ddp
    distributed = config.trainer.optimizer.distributed
    reduces = bool(passed.get("overlap_grad_reduce", True))
    return {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": distributed and reduces,
        **passed,
    }


def transformer_fields(config: Config) -> dict[str, Any]:
    """Return the fields of TransformerConfig: those of `trainer.recompute`, replaced by `megatron.transformer`."""
    return {**_recompute_fields(config.trainer.recompute), **config.megatron.transformer}


def passes_recompute(config: Config) -> bool:
    """Tell whether `megatron.transformer` decides about recomputation, so that `trainer.recompute` does not."""
    return any(name.startswith("recompute_") for name in config.megatron.transformer)


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    """Return Megatron's fields; an unresolved `auto` recomputes nothing (megarl/config/memory_plan/memory.py
    resolves it)."""
    if recompute in ("auto", "none"):
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": recompute}
