"""The routers of a mixture of experts: recording and replaying their choices, and their auxiliary losses as metrics.

Shapes: T packed tokens, L MoE layers of this rank in the order of its chunks, K experts per token.
"""

from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megarl import platforms
from megarl.models.megatron.shards import unwrap
from megarl.queue.routes import Routes, RoutesSpec

_BALANCING = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class AuxLosses:
    """The auxiliary losses of this rank's routers, without their coefficients, as the metrics of an update."""

    def __init__(self, chunks: Sequence[torch.nn.Module], config: TransformerConfig) -> None:
        freq = config.moe_layer_freq
        self._layers = sum(freq) if isinstance(freq, list) else config.num_layers
        self._balancing, self._has_z = _balancing(config), bool(config.num_moe_experts and config.moe_z_loss_coeff)
        self._z_sum = torch.zeros((), dtype=torch.float64, device=platforms.current().device)
        self._routers = _routers(chunks)
        for router in self._routers if self._has_z else ():
            router.register_forward_hook(self._take_z_loss)

    def _take_z_loss(self, router: torch.nn.Module, args: tuple[Tensor, Tensor | None], output: object) -> None:
        """Megatron tracks a mean over a rank's rows, of which padding leaves some ranks fewer: turn it into a sum."""
        tracked = get_moe_metrics_tracker().metrics.get("z_loss")
        if tracked is not None:
            hidden_T1H, padding_T1 = args
            rows = hidden_T1H.shape[0] if padding_T1 is None else (~padding_T1).sum()
            self._z_sum += tracked.values.sum() * rows
            tracked.values.zero_()

    def clear(self) -> None:
        """Delete the values that were tracked, and the loads of a global balancing; call it before each update."""
        get_moe_metrics_tracker().clear()
        self._z_sum.zero_()
        for router in self._routers:
            router.reset_global_aux_loss_tracker()

    def metrics(self, micro_batches: int, tokens: int) -> dict[str, float]:
        """Return `aux_loss` and `moe_z_loss`, as far as they are on: means over MoE layers. Collective over the world.

        An `aux_loss` is one value per micro-batch, and 1 is perfect balance; a z-loss is one per token.
        `micro_batches`: the number of non-empty micro-batches of all replicas together. `tokens`: theirs, not padding.
        """
        if not self._balancing and not self._has_z:
            return {}
        tracked = get_moe_metrics_tracker().metrics
        # A stage without MoE layers tracked nothing, but must take part in the all-reduce.
        balance = torch.zeros_like(self._z_sum)
        for name in self._balancing & tracked.keys():
            # Of a global balancing all replicas' micro-batches, one of each, have one value.
            replicas = parallel_state.get_data_parallel_world_size() if name == _BALANCING["global_aux_loss"] else 1
            balance += tracked[name].values.sum() * replicas
        totals_2 = torch.stack([balance, self._z_sum])
        torch.distributed.all_reduce(totals_2)
        aux_loss, z_loss = (totals_2 / self._layers).tolist()
        return ({"aux_loss": aux_loss / max(micro_batches, 1)} if self._balancing else {}) | (
            {"moe_z_loss": z_loss / max(tokens, 1)} if self._has_z else {}
        )


def _routers(chunks: Sequence[torch.nn.Module]) -> list[TopKRouter]:
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]


def _balancing(config: TransformerConfig) -> set[str]:
    """Return the names under which Megatron tracks the balancing losses that are on."""
    if not config.num_moe_experts:
        return set()
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    coefficients = [coefficients] * len(kinds) if isinstance(coefficients, float | int) else coefficients
    return {_BALANCING[kind] for kind, c in zip(kinds, coefficients, strict=True) if c and kind in _BALANCING}


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
            routers = _routers([chunk])
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
            rows_TLK = torch.cat(gathered(rows_TLK, parallel_state.get_tensor_model_parallel_group()))
        self._recorded[chunk].append(rows_TLK)

    def end(self) -> list[Tensor]:
        """Let the routers choose again; return what was kept, [T, L, K] per micro-batch, in order."""
        for replays in self._replays.values():
            for replay in replays.values():
                replay.clear_indices()
                replay.clear_router_replay_action()
        kept, self._recorded = self._recorded, {chunk: [] for chunk in self._replays}
        return [torch.cat(parts, 1) for parts in zip(*kept.values(), strict=True)]


def gathered(rows_TLK: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return the experts that each rank of `group` passes, in the order of the ranks. Collective."""
    mine = rows_TLK.view(torch.uint8)  # neither NCCL nor gloo takes int16
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(parts, mine, group=group)
    return [part.view(rows_TLK.dtype) for part in parts]
