"""Metrics of the routers' auxiliary losses, as Megatron tracks them. Shapes: N tracked losses."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl import platforms

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def clear_aux_losses() -> None:
    """Delete the values that were tracked; call it before each update."""
    clear_aux_losses_tracker()


def aux_loss_metrics(config: TransformerConfig, micro_batches: int) -> dict[str, float]:
    """Return `aux_loss` and `moe_z_loss`, as far as they are on: means over MoE layers and micro-batches.

    The values do not include the coefficients; an `aux_loss` of 1 is perfect balance. Collective over the world.
    `micro_batches`: the number of non-empty micro-batches of all replicas together.
    """
    names = _tracked(config)
    if not names:
        return {}
    layers = config.num_layers
    if isinstance(config.moe_layer_freq, list):
        layers = sum(config.moe_layer_freq)
    tracker = get_moe_layer_wise_logging_tracker()
    device = platforms.current().device
    # A stage without MoE layers tracked nothing, but must take part in the all-reduce.
    totals_N = torch.stack(
        [
            tracker[name]["values"].sum().double()
            if name in tracker
            else torch.zeros((), dtype=torch.float64, device=device)
            for name in names
        ]
    )
    torch.distributed.all_reduce(totals_N)
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    metrics: dict[str, float] = {}
    for name, total in zip(names, totals_N.tolist(), strict=True):
        value = total / (layers * max(micro_batches, 1))
        if name == "z_loss":
            # Of the z-loss each tensor rank tracked a mean over its own rows; of the other losses, a part of the sum.
            # The means have equal weights here, although padding leaves some ranks fewer rows (the gradient is exact).
            metrics["moe_z_loss"] = value / tensor
        else:
            metrics["aux_loss"] = metrics.get("aux_loss", 0.0) + value
    return metrics


def _tracked(config: TransformerConfig) -> list[str]:
    if not config.num_moe_experts:
        return []
    kinds = config.moe_router_load_balancing_type
    coefficients = config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    coefficients = [coefficients] * len(kinds) if isinstance(coefficients, float | int) else list(coefficients)
    names = [_BALANCING[kind] for kind, c in zip(kinds, coefficients, strict=True) if c and kind in _BALANCING]
    return names + ["z_loss"] * bool(config.moe_z_loss_coeff)
