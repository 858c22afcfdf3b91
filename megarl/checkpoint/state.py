"""What the trainer ranks hold, as Megatron-Core's sharded state: weights, optimizer, schedule, random states.

Tensors are keyed by the model's parameters and nothing else, so that any TP, PP, VPP, EP and DP loads what another
one saved. The few numbers beside them (Adam's step, the schedule's position) go through JSON: the parameter groups of
a loading optimizer are its own, with the learning rate and decay of the config it was built from.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.checkpoint.scheme import content_metadata, model_sharded_state_dict
from megarl.models.layout import Layout
from megarl.trainer.policy import Policy

RNG_KEY = "rng_state"


def sharded_state(policy: Policy, *, loading: bool, with_rng: bool = True) -> dict[str, Any]:
    """Everything that `dist_checkpointing` saves or loads. Collective over the world.

    For saving, the distributed optimizer's shards are gathered inside each data-parallel group, in host memory.
    `with_rng=False` leaves the random states out: they belong to one layout.
    """
    model = model_sharded_state_dict(policy.module_chunks, policy.info)
    state: dict[str, Any] = {
        "model": model,
        "router_bias": _router_biases(policy),
        "optimizer": {
            str(index): _sharded_part(inner.sharded_state_dict(model, is_loading=loading, metadata=content_metadata()))
            for index, inner in enumerate(inner_optimizers(policy.optimizer))
        },
    }
    if with_rng:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        state["rng"] = ShardedObject(RNG_KEY, rng_state(), (world,), (rank,), replica_id=0)
    return state


def load_sharded_state(policy: Policy, state: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Take over what `dist_checkpointing.load` made of `sharded_state(loading=True)`. Weights are in place already."""
    for index, inner in enumerate(inner_optimizers(policy.optimizer)):
        _load_optimizer(inner, state["optimizer"].get(str(index), {}), numbers["optimizer_step"])
    policy.scheduler.num_steps = 0
    policy.scheduler.step(int(numbers["scheduler_step"]))
    for module in _routers(policy):
        module.expert_bias.copy_(state["router_bias"][_bias_key(module)])
    if "rng" in state:
        set_rng_state(state["rng"])


def trainer_numbers(policy: Policy) -> dict[str, Any]:
    """The numbers that `load_sharded_state` wants back; JSON."""
    return {"optimizer_step": optimizer_step(policy.optimizer), "scheduler_step": int(policy.scheduler.num_steps)}


def optimizer_step(optimizer: Any) -> int:
    """Updates that Adam has counted. ValueError if its parts differ."""
    steps = {step for inner in inner_optimizers(optimizer) for step in _steps(inner)}
    if len(steps) > 1:
        raise ValueError(f"the optimizer's parts are at different steps: {sorted(steps)}")
    return int(steps.pop()) if steps else 0


def layout_record(layout: Layout) -> dict[str, Any]:
    """The layout that random states belong to; JSON."""
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "virtual_pipeline": layout.virtual_pipeline,
        "expert": layout.expert,
        "expert_tensor": layout.etp,
        "sequence": layout.sequence,
        "ranks": layout.world_size,
    }


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Megatron chains one optimizer for dense and one for expert parameters, if there are both."""
    return [inner for inner in getattr(optimizer, "chained_optimizers", [optimizer]) if not _is_stub(inner)]


def _is_stub(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def _steps(inner: Any) -> set[float]:
    """torch's Adam counts in each parameter's state (in its groups a load leaves an old number), others in groups."""
    states = {float(state["step"]) for state in inner.optimizer.state.values() if "step" in state}
    return states or {float(group["step"]) for group in inner.optimizer.param_groups if "step" in group}


def _sharded_part(state: Any) -> Any:
    return extract_matching_values(state, lambda value: isinstance(value, ShardedBase), return_lists_as_dicts=True)[0]


def _load_optimizer(inner: Any, loaded: Any, step: int) -> None:
    """The loaded tensors with this optimizer's own parameter groups, at Adam's `step`."""
    state = inner.state_dict()
    if isinstance(inner, DistributedOptimizer):
        state["param_state"] = loaded.get("param_state", {})
        state["param_state_sharding_type"] = content_metadata()["distrib_optim_sharding_type"]
        groups = state["optimizer"]["param_groups"]
    else:
        torch_state = state.get("optimizer", state)
        groups = torch_state["param_groups"]
        _overlay(state, loaded)
        for entry in torch_state["state"].values():
            entry["step"] = torch.tensor(float(step))
    for group in groups:
        if "step" in group or isinstance(inner, DistributedOptimizer):
            group["step"] = step
    inner.load_state_dict(state)


def _overlay(state: Any, loaded: Any) -> Any:
    """`state` with every leaf that `loaded` has (a dict or list inside a dict or list) replaced, in place."""
    if not isinstance(loaded, dict | list):
        return loaded
    for key, value in loaded.items() if isinstance(loaded, dict) else enumerate(loaded):
        state[key] = _overlay(state[key], value)
    return state


def _routers(policy: Policy) -> Iterator[Any]:
    """Routers with a balancing bias, which is a buffer: no parameter, yet part of what the model computes."""
    for chunk in policy.module_chunks:
        for module in chunk.modules():
            if isinstance(getattr(module, "expert_bias", None), torch.Tensor):
                yield module


def _bias_key(router: Any) -> str:
    return f"router_bias.{router.layer_number}"


def _router_biases(policy: Policy) -> dict[str, ShardedTensor]:
    data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    replica = (0, parallel_state.get_tensor_model_parallel_rank(), data)
    return {
        _bias_key(router): ShardedTensor.from_rank_offsets(_bias_key(router), router.expert_bias, replica_id=replica)
        for router in _routers(policy)
    }


def rng_state() -> dict[str, Any]:
    """Random states of this process, as tensors and plain numbers: Python, numpy, torch, Megatron's tracker."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    return {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])
