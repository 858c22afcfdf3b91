"""What the trainer ranks hold, as Megatron-Core's sharded state: weights, optimizer, schedule, random states.

Tensors are keyed by the model's parameters and nothing else, so that any TP, PP, VPP, EP and DP loads what another
one saved. The few numbers beside them (Adam's step, the schedule's position) go through JSON: the parameter groups of
a loading optimizer are its own, with the learning rate and decay of the config it was built from.
"""

from __future__ import annotations

import random
from typing import Any, cast

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject

from megarl.checkpoint.format.sharding import model_sharded_state_dict
from megarl.checkpoint.save.optimizer_shards import live_views, optimizer_shards, set_step, take_over
from megarl.models.layout import Layout
from megarl.trainer.policy import Policy

RNG_KEY = "rng_state"


def sharded_state(policy: Policy, *, with_rng: bool = True) -> dict[str, Any]:
    """Everything that `dist_checkpointing` saves or loads, as views of what this rank holds.

    `with_rng=False` leaves the random states out: they belong to one layout.
    """
    model = model_sharded_state_dict(policy.module_chunks, policy.info)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": {
            str(index): optimizer_shards(inner, model) for index, inner in enumerate(inner_optimizers(policy.optimizer))
        },
    }
    if with_rng:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        state["rng"] = ShardedObject(RNG_KEY, rng_state(), (world,), (rank,), replica_id=0)
    return state


def optimizer_views(state: dict[str, Any]) -> dict[str, Any]:
    """Of `sharded_state`, before it is loaded: where the optimizers' tensors are."""
    return {index: live_views(shards) for index, shards in state["optimizer"].items()}


def load_sharded_state(policy: Policy, state: dict[str, Any], numbers: dict[str, Any], views: dict[str, Any]) -> None:
    """Take over what `dist_checkpointing.load` made of `sharded_state`. Weights are in place already.

    `views`: `optimizer_views` of the state that was loaded into.
    """
    for index, inner in enumerate(inner_optimizers(policy.optimizer)):
        take_over(views[str(index)], state["optimizer"].get(str(index), {}))
        set_step(inner.optimizer, numbers["optimizer_step"])
    policy.scheduler.num_steps = 0
    policy.scheduler.step(int(numbers["scheduler_step"]))
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
    """torch's Adam counts in each parameter's state, others in groups."""
    states = {float(state["step"]) for state in inner.optimizer.state.values() if "step" in state}
    return states or {float(group["step"]) for group in inner.optimizer.param_groups if "step" in group}


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
