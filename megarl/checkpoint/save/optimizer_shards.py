"""An optimizer's state as sharded tensors in the parameters' shapes. Each rank writes and reads its part.

Megatron-Core's `fully_reshardable` format (distrib_optimizer.py:1690) gathers the distributed optimizer's state on each
rank of a data-parallel group, to save and again to load. Here keys, shapes and content are the same, but the chunks
differ: a rank's flat range of a parameter is a few rectangles of it. A non-distributed optimizer has whole parameters
under the same keys, so each kind can load the other's checkpoints.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

PREFIX = "optimizer.state"  # as in Megatron-Core
MOMENTS = ("exp_avg", "exp_avg_sq")

Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory
ShardTree: TypeAlias = dict[str, dict[str, ShardedTensor]]  # by "{number}.{state name}", then by part


@dataclass(frozen=True)
class Rectangle:
    """A rectangle inside a tensor: `offset` and `shape` per axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def rectangles(shape: tuple[int, ...], start: int, end: int) -> list[Rectangle]:
    """Return elements [start, end) of a row-major tensor as disjoint rectangles in flat order; a matrix needs <= 3."""
    if start >= end:
        return []
    if len(shape) == 1:
        return [Rectangle((start,), (end - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the complete rows
    if first > last:
        return _inside_row(shape, last, start, end)
    boxes = _inside_row(shape, first - 1, start, first * row)
    if first < last:
        boxes.append(Rectangle((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    return boxes + _inside_row(shape, last, last * row, end)


def _inside_row(shape: tuple[int, ...], index: int, start: int, end: int) -> list[Rectangle]:
    """Return elements [start, end), all in row `index`, as rectangles."""
    before = index * math.prod(shape[1:])
    inner = rectangles(shape[1:], start - before, end - before)
    return [Rectangle((index, *box.offset), (1, *box.shape)) for box in inner]


@dataclass(frozen=True)
class OwnedRange:
    """A rank's part of a model parameter: elements [start, end), fp32, as flat or whole tensors by state name."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    tensors: dict[str, torch.Tensor]


def optimizer_shards(optimizer: MegatronOptimizer, model: Mapping[str, Sharded]) -> ShardTree:
    """Return the shards `optimizer.state.{param, exp_avg, exp_avg_sq}.KEY`, nested by parameter and state.

    Data are views of the optimizer's tensors. `optimizer`: not a chained one. `model`: from `training_state`'s
    `model_sharded_state_dict`. A new optimizer first gets zero moments, as its first step would create. Raises
    ValueError for a parameter that is not in `model`.
    """
    if not optimizer.optimizer.state:
        _allocate(optimizer.optimizer)
    distributed = isinstance(optimizer, DistributedOptimizer)
    places = {id(sharded.data): sharded for sharded in model.values()}
    state: ShardTree = {}
    for number, held in enumerate(_of_distributed(optimizer) if distributed else _of_plain(optimizer)):
        if id(held.parameter) not in places:
            raise ValueError(f"parameter of shape {list(held.parameter.shape)} is not in the model's sharded state")
        for name in ("param", *MOMENTS):
            flat = held.tensors[name].detach().view(-1)
            shards = _cut(places[id(held.parameter)], f"{PREFIX}.{name}.", flat, held, distributed)
            state[f"{number}.{name}"] = {str(part): shard for part, shard in enumerate(shards)}
    return state


def counts_in_state(adam: torch.optim.Optimizer) -> bool:
    """Return whether Adam counts updates in each parameter's state (torch's), not in its groups (fused ones)."""
    return isinstance(adam, torch.optim.Adam)  # AdamW is one


def set_step(adam: torch.optim.Optimizer, step: int) -> None:
    """Set the number of updates that Adam has counted."""
    if counts_in_state(adam):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(step))
    else:
        for group in adam.param_groups:
            group["step"] = step


def _of_distributed(optimizer: DistributedOptimizer) -> Iterator[OwnedRange]:
    """Yield the ranges of parameters that a rank of the distributed optimizer owns.

    Megatron-Core's own function takes another parameter's state if a group has fp32 and bf16 parameters.
    """
    pairs = (
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    )
    mains = {
        id(parameter): main
        for models, shards in pairs
        for group in zip(models, shards, strict=True)
        for parameter, main in zip(*group, strict=True)
    }
    for range_maps in optimizer.gbuf_ranges:
        for buckets in range_maps.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    main = mains[id(parameter)]
                    tensors = {"param": main, **optimizer.optimizer.state[main]}
                    yield OwnedRange(parameter, ranges["param"].start, ranges["param"].end, tensors)


def _of_plain(optimizer: MegatronOptimizer) -> Iterator[OwnedRange]:
    """Yield the whole parameters of a non-distributed optimizer.

    FP32Optimizer updates the model's parameters, Float16OptimizerWithFloat16Params updates fp32 copies.
    """
    groups = getattr(optimizer, "float16_groups", []), getattr(optimizer, "fp32_from_float16_groups", [])
    copied = {id(copy): parameter for pair in zip(*groups, strict=True) for parameter, copy in zip(*pair, strict=True)}
    for group in optimizer.optimizer.param_groups:
        for main in group["params"]:
            tensors = {"param": main, **optimizer.optimizer.state[main]}
            yield OwnedRange(copied.get(id(main), main), 0, main.numel(), tensors)


def _allocate(adam: torch.optim.Optimizer) -> None:
    """Create the state of an Adam before its first step."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            moments = {name: torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False) for name in MOMENTS}
            if counts_in_state(adam):
                moments["step"] = torch.tensor(0.0)
            adam.state[parameter] = moments


def _cut(sharded: Sharded, prefix: str, flat: torch.Tensor, held: OwnedRange, distributed: bool) -> list[ShardedTensor]:
    """Return shards of `flat`, a range of the flattened local tensor that `sharded` places in global tensors."""
    found, before, taken = [], 0, 0
    for whole in sharded.build() if isinstance(sharded, ShardedTensorFactory) else [sharded]:
        size = math.prod(whole.local_shape)
        inside = max(held.start - before, 0), min(held.end - before, size)
        for box in rectangles(tuple(whole.local_shape), *inside):
            data = flat[taken : taken + box.numel].view(box.shape)
            taken += box.numel
            found.append(
                ShardedTensor(
                    key=prefix + whole.key,
                    data=data,
                    dtype=data.dtype,
                    local_shape=box.shape,
                    global_shape=whole.global_shape,
                    global_offset=tuple(a + b for a, b in zip(whole.global_offset, box.offset, strict=True)),
                    axis_fragmentations=None,  # the rectangles form no regular grid
                    # Data-parallel ranks hold different parts (distributed) or equal ones.
                    replica_id=(*whole.replica_id[:2], 0) if distributed else whole.replica_id,
                    allow_shape_mismatch=whole.allow_shape_mismatch,
                )
            )
        before += size
    if taken != flat.numel():
        raise ValueError(f"{prefix}: only {taken} of {flat.numel()} elements have a place in the global tensors")
    return found
