"""Loads weights, optimizer and schedule of the trainer from a checkpoint of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from megarl.checkpoint.format.common_state import load_shards
from megarl.checkpoint.format.mapped_reader import MappedLoadStrategy
from megarl.checkpoint.save.training_state import load_sharded_state, optimizer_views, sharded_state
from megarl.common.process.memory_tuning import collections_paused
from megarl.trainer.parallel import on_one_host
from megarl.trainer.policy import Policy

# The parts of the state whose tensors are those of a model.
_WEIGHTS = ("model", "reference")


def load_trainer_state(policy: Policy, path: Path, numbers: dict[str, Any], *, with_rng: bool) -> None:
    """Load weights, optimizer and schedule of `policy` from a checkpoint of any layout. Collective.

    `numbers`: the checkpoint's `trainer_numbers`. `with_rng`: load the random states too, for an equal layout. A
    reference that had taken the policy's weights is loaded too, if the run has one.
    """
    if policy.reference is not None:
        policy.reference.refreshed = int(numbers.get("reference_step", 0))
    state = sharded_state(policy, with_rng=with_rng)
    parameters = {part: {name: each.data for name, each in state[part].items()} for part in _WEIGHTS if part in state}
    optimizer = optimizer_views(state)
    with collections_paused():
        loaded = load_shards(state, path, _strategy())
    with torch.no_grad():
        for part, tensors in parameters.items():
            for name, parameter in tensors.items():
                # A rank that loads it does so in place; it may receive it from a peer instead, and the halves of a
                # gated layer are a new tensor.
                if loaded[part][name].data_ptr() != parameter.data_ptr():
                    parameter.copy_(loaded[part][name])
    load_sharded_state(policy, loaded, numbers, optimizer)


def _strategy() -> object:
    """Return what reads the shards.

    Ranks of several hosts share the reading of what they all need, and send it to each other. On one host each rank
    reads for itself: a file that is read twice comes from the page cache, which takes less time than sending it.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if group.size() == 1 or on_one_host():
        return MappedLoadStrategy()
    return FullyParallelLoadStrategyWrapper(MappedLoadStrategy(), group)
