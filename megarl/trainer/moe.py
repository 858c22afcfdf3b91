"""The routers of a mixture of experts: recording and replaying their choices, and their auxiliary losses as metrics.

Shapes: T packed tokens, L MoE layers of this rank in the order of its chunks, K experts per token, N tracked losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl import platforms
from megarl.models.megatron.shards import unwrap
from megarl.queue.routes import Routes, RoutesSpec

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def clear_aux_losses() -> None:
    """Delete the tracked values; call it before each update."""
    clear_aux_losses_tracker()


def aux_loss_metrics(config: TransformerConfig, micro_batches: int) -> dict[str, float]:
    """Return `aux_loss` and `moe_z_loss`, those that are on: means over MoE layers and micro-batches.

    Without coefficients; an `aux_loss` of 1 is perfect balance. Collective over all ranks. `micro_batches`: non-empty
    micro-batches of all replicas together.
    """
    names = _tracked(config)
    if not names:
        return {}
    layers = config.num_layers
    if isinstance(config.moe_layer_freq, list):
        layers = sum(config.moe_layer_freq)
    tracker = get_moe_layer_wise_logging_tracker()
    device = platforms.current().device
    # A stage without MoE layers tracks nothing, but must take part in the all-reduce.
    zero = torch.zeros((), dtype=torch.float64, device=device)
    totals_N = torch.stack([tracker[name]["values"].sum().double() if name in tracker else zero for name in names])
    torch.distributed.all_reduce(totals_N)
    sharing = parallel_state.get_tensor_and_context_parallel_group().size()
    metrics: dict[str, float] = {}
    for name, total in zip(names, totals_N.tolist(), strict=True):
        value = total / (layers * max(micro_batches, 1))
        if name == "z_loss":
            # Each rank of a stage tracked the mean z-loss of its rows, and a part of the sum of the other losses. The
            # means get equal weights here, although padding leaves some ranks fewer rows (the gradient is exact).
            metrics["moe_z_loss"] = value / sharing
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


class RoutedExperts:
    """Records or replays the experts that the routers of this rank's chunks choose, one micro-batch at a time.

    Only these chunks' routers: Megatron's process-wide list includes other models'. Megatron's list for the backward
    pass is not used, because nothing empties it in forward-only passes. Instead, call `begin` again before each
    backward pass, which may recompute the routers.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        """`chunks`: built with `moe_enable_routing_replay`."""
        self._replays: dict[torch.nn.Module, dict[int, RouterReplay]] = {}
        self.layers: list[int] = []  # their numbers in the model, from 0
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._replays[unwrap(chunk)] = {len(self.layers) + i: each.router_replay for i, each in enumerate(routers)}
            self.layers += [router.layer_number - 1 for router in routers]
        self.spec = RoutesSpec(len(self.layers), config.moe_router_topk, int(config.num_moe_experts or 0))
        self.dtype = torch.uint8 if self.spec.experts <= 256 else torch.int16
        self._scattered = config.sequence_parallel
        self._recorded: dict[torch.nn.Module, list[Tensor]] = {chunk: [] for chunk in self._replays}

    def own(self, routes: Routes, moe_layers: Sequence[bool]) -> Tensor:
        """Return the experts of an engine's `routes` for this rank's layers, [T, L, K] with a row for the last token.

        The engine has not read the last token, and nothing is predicted from it: it gets experts 0..K-1.
        """
        places = [sum(moe_layers[:layer]) for layer in self.layers]
        own_TLK = torch.from_numpy(routes.experts_TLK[:, places].astype(np.int16)).to(self.dtype)
        last_TLK = torch.arange(self.spec.topk, dtype=self.dtype).expand(1, len(places), self.spec.topk)
        return torch.cat([own_TLK, last_TLK])

    def begin(self, chunk: torch.nn.Module, routes_TLK: Tensor | None) -> None:
        """Prepare a pass of `chunk`: replay its layers and this rank's rows of `routes_TLK`; None: record."""
        rows_TLK = routes_TLK
        if rows_TLK is not None and self._scattered:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            rows_TLK = rows_TLK.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
        for layer, replay in self._replays[chunk].items():
            replay.clear_indices()
            if rows_TLK is None:
                replay.set_router_replay_action(RouterReplayAction.RECORD)
            else:
                replay.set_target_indices(rows_TLK[:, layer].long())  # `gather` needs int64
                replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

    def keep(self, chunk: torch.nn.Module, tokens: int) -> None:
        """Keep what `chunk` recorded in the last forward pass, of `tokens` = T rows."""
        recorded = [replay.get_recorded_indices() for replay in self._replays[chunk].values()]
        if not recorded:
            self._recorded[chunk].append(
                torch.empty(tokens, 0, self.spec.topk, dtype=self.dtype, device=platforms.current().device)
            )
            return
        rows_TLK = torch.stack(recorded, 1).to(self.dtype)
        if self._scattered:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(rows_TLK) for _ in range(group.size())]
            torch.distributed.all_gather(parts, rows_TLK, group=group)
            rows_TLK = torch.cat(parts)
        self._recorded[chunk].append(rows_TLK)

    def end(self) -> list[Tensor]:
        """Let the routers choose again; return what was kept, [T, L, K] per micro-batch, in order."""
        for replays in self._replays.values():
            for replay in replays.values():
                replay.clear_indices()
                replay.clear_router_replay_action()
        kept, self._recorded = self._recorded, {chunk: [] for chunk in self._replays}
        return [torch.cat(parts, 1) for parts in zip(*kept.values(), strict=True)]
