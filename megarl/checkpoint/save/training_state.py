"""The trainer ranks' state as Megatron-Core's sharded state: weights, optimizer, schedule, random states.

Tensors are keyed only by the model's parameters, so any TP, PP, VPP, EP and DP can load what another layout saved. The
few other numbers (Adam's step, the schedule's position) are JSON. A loading optimizer keeps its parameter groups, with
learning rate and weight decay from its config.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer

from megarl.checkpoint.format.keys import StoredTensor, stored_tensors
from megarl.checkpoint.format.mapped_reader import MappedLoadStrategy, load_shards
from megarl.checkpoint.save.optimizer_shards import optimizer_shards, set_step
from megarl.common.process.memory_tuning import collections_paused
from megarl.models.architecture.architecture import ModelInfo
from megarl.models.megatron.layout import UNEVEN_STAGES, Layout
from megarl.models.megatron.shards import Shard, local_shards, table
from megarl.trainer.parallel import on_one_host
from megarl.trainer.policy import Policy
from megarl.trainer.reference_policy import ReferenceModel

# A rank's shards of a model for Megatron-Core's `torch_dist` format, under the keys of keys.py.


def model_sharded_state_dict(
    chunks: Sequence[torch.nn.Module], info: ModelInfo
) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return this rank's parameters for `megatron.core.dist_checkpointing.save` and `load`, by canonical name.

    `chunks` may be wrapped in DDP and Float16Module. Each value's `.data` is the parameter itself, as Megatron's
    optimizers require; parameters with sections are factories. `load` writes in place. Raises ValueError for a
    parameter that the family's table does not cover.
    """
    entries = table(info)
    stored = stored_tensors(entries)
    return {shard.name: _sharded(shard, stored[shard.entry.megatron]) for shard in local_shards(chunks, info, entries)}


def _sharded(shard: Shard, stored: list[StoredTensor]) -> ShardedTensor | ShardedTensorFactory:
    replica = _replica(shard)
    if len(stored) == 1:
        return _sharded_tensor(stored[0].key, shard.parameter, shard, replica)
    base = stored[0].key.removesuffix(stored[0].suffix)

    def build(
        key: str, data: torch.Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> list[ShardedTensor]:
        sections = data.detach().split([each.shape[0] // shard.size for each in stored])
        return [
            _sharded_tensor(key + each.suffix, section, shard, replica_id)
            for each, section in zip(stored, sections, strict=True)
        ]

    return ShardedTensorFactory(base, shard.parameter, build, torch.cat, replica)


def _sharded_tensor(key: str, data: torch.Tensor, shard: Shard, replica: ReplicaId) -> ShardedTensor:
    rule = shard.entry.rule
    place = [] if rule.axis is None else [(rule.axis, shard.rank, shard.size)]
    return ShardedTensor.from_rank_offsets(
        key,
        data,
        *place,
        replica_id=replica,
        # The number of padding rows depends on the tensor-parallel size; loading zeroes them first.
        allow_shape_mismatch=rule.pad_to_tp,
    )


def _replica(shard: Shard) -> tuple[int, int, int]:
    """Return the (pipeline, tensor, data) replica id of a shard; only (0, 0, 0) is written."""
    if shard.entry.expert is not None:
        data = parallel_state.get_expert_data_parallel_rank()
    else:
        data = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    tensor = shard.rank if shard.entry.rule.axis is None else 0
    return (1 if shard.is_tied_copy else 0, tensor, data)


RNG_KEY = "rng_state"
REFERENCE_PREFIX = "reference."


def sharded_state(policy: Policy, *, with_rng: bool = True) -> dict[str, Any]:
    """Return everything that `dist_checkpointing` saves or loads, as views of this rank's tensors.

    `with_rng=False`: without random states, which belong to one layout.
    """
    model = model_sharded_state_dict(policy.module_chunks, policy.info)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": {
            str(index): optimizer_shards(inner, model) for index, inner in enumerate(inner_optimizers(policy.optimizer))
        },
    }
    if policy.reference is not None and policy.reference_step:
        state["reference"] = reference_shards(policy.reference)
    if with_rng:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        state["rng"] = ShardedObject(RNG_KEY, rng_state(), (world,), (rank,), replica_id=0)
    return state


def reference_shards(reference: ReferenceModel) -> dict[str, Any]:
    """Return views of the reference's tensors under separate keys, not to be taken for the model's weights."""
    shards = model_sharded_state_dict(reference.chunks, reference.info)
    for shard in shards.values():
        shard.key = f"{REFERENCE_PREFIX}{shard.key}"
    return shards


def live_views(shards: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a part of `sharded_state`, nested by the same keys."""
    return {name: live_views(each) if isinstance(each, dict) else each.data for name, each in shards.items()}


def take_over(views: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Copy what `dist_checkpointing.load` did not load in place into `views`, taken before the load.

    Tensors received from a peer, and the joined halves of a gated layer, are new tensors.
    """
    for name, view in views.items():
        if isinstance(view, dict):
            take_over(view, loaded.get(name, {}))
        elif loaded[name].data_ptr() != view.data_ptr():
            view.copy_(loaded[name])


def trainer_numbers(policy: Policy) -> dict[str, Any]:
    """Return the numbers that `load_trainer_state` needs, as JSON."""
    return {
        "optimizer_step": optimizer_step(policy.optimizer),
        "scheduler_step": int(policy.scheduler.num_steps),
        "mini_batches": policy.config.trainer.mini_batches,
        "reference_step": policy.reference_step,
    }


def scheduler_position(numbers: Mapping[str, Any], mini_batches: int) -> int:
    """Return a checkpoint's position in the schedule, in updates of this run, which has `mini_batches` per step."""
    return int(numbers["scheduler_step"]) * mini_batches // int(numbers["mini_batches"])


def optimizer_step(optimizer: MegatronOptimizer) -> int:
    """Return Adam's number of updates. Raises ValueError if the optimizer's parts differ."""
    steps = {step for inner in inner_optimizers(optimizer) for step in _steps(inner)}
    if len(steps) > 1:
        raise ValueError(f"the optimizer's parts are at different steps: {sorted(steps)}")
    return int(steps.pop()) if steps else 0


def layout_record(layout: Layout) -> dict[str, Any]:
    """Return the layout, on which random states depend, as JSON."""
    return {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "virtual_pipeline": layout.virtual_pipeline,
        "expert": layout.expert,
        "expert_tensor": layout.etp,
        "sequence": layout.sequence,
        "ranks": layout.world_size,
        # Only if set, for equality with older records.
        **{name: given for name in UNEVEN_STAGES if (given := getattr(layout, name))},
        **({"context": layout.context} if layout.context > 1 else {}),
    }


def inner_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the parts of a chained optimizer: Megatron has one for dense and one for expert parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in parts if not getattr(inner, "is_stub_optimizer", False)]


def _steps(inner: MegatronOptimizer) -> set[float]:
    """Return all update counts: torch's Adam counts in each parameter's state, others in the groups."""
    states = {float(state["step"]) for state in inner.optimizer.state.values() if "step" in state}
    return states or {float(group["step"]) for group in inner.optimizer.param_groups if "step" in group}


def rng_state() -> dict[str, Any]:
    """Return the random states of Python, numpy, torch and Megatron's tracker, as tensors and plain numbers."""
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
    """Restore the result of `rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["megatron"])


def load_trainer_state(policy: Policy, path: Path, numbers: dict[str, Any], *, with_rng: bool) -> None:
    """Load weights, optimizer and schedule of `policy` from a checkpoint of any layout. Collective.

    `numbers`: the checkpoint's `trainer_numbers`. `with_rng`: also load the random states (same layout). Also loads the
    reference, if the run has one that had taken the policy's weights.
    """
    if policy.reference is not None:
        policy.reference.refreshed = int(numbers.get("reference_step", 0))
    state = sharded_state(policy, with_rng=with_rng)
    views = live_views({part: shards for part, shards in state.items() if part != "rng"})
    with collections_paused():
        loaded = load_shards(state, path, _strategy())
    with torch.no_grad():
        take_over(views, loaded)
    for inner in inner_optimizers(policy.optimizer):
        set_step(inner.optimizer, numbers["optimizer_step"])
    policy.scheduler.num_steps = 0
    policy.scheduler.step(scheduler_position(numbers, policy.config.trainer.mini_batches))
    if "rng" in loaded:
        set_rng_state(loaded["rng"])


def _strategy() -> object:
    """Return the load strategy.

    Ranks on several hosts share the reading of common tensors and send them to each other. On one host each rank reads
    everything it needs: the page cache is faster than sending.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1 or on_one_host():
        return MappedLoadStrategy()
    return FullyParallelLoadStrategyWrapper(MappedLoadStrategy(), group)
