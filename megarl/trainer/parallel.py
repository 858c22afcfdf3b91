"""Megatron's parallel state for one layout, and the functions through which megarl reads it.

A *replica* is the tensor x context x pipeline ranks that train on one share of the data. Its *leader* is its first
rank: tensor and context rank 0 of the first pipeline stage.
"""

import math
import os
from typing import TypeVar

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megarl.common.trust.object_collectives import Codec, all_gather
from megarl.models.megatron.layout import Layout

T = TypeVar("T")


def initialize(layout: Layout, *, seed: int, timeout_s: float) -> None:
    """Build Megatron's process groups and seed its random states. torch.distributed must be initialised.

    `timeout_s`: the timeout of collectives in seconds, rounded up to whole minutes. Raises ValueError if the layout is
    for another world size.
    """
    world = torch.distributed.get_world_size()
    if world != layout.world_size:
        raise ValueError(f"the layout is for {layout.world_size} ranks, torchrun started {world}; set trainer.gpus")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        context_parallel_size=layout.context,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        # Megatron takes whole minutes.
        distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    # Required even if nothing is random: attention forks the random-state tracker that this call registers.
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def on_one_host() -> bool:
    """Return whether torchrun has started all ranks on this host; False without torchrun."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(torch.distributed.get_world_size())


def destroy() -> None:
    """Destroy the layout and its process groups, so that the same processes can initialise another layout.

    First delete the models, which refer to the groups, and call gc.collect(): DDP's hooks form reference cycles.
    """
    # Megatron only drops its references; a group keeps threads and sockets until it is destroyed and unreferenced.
    groups = [group for group in parallel_state._global_process_group_list or [] if group is not None]
    parallel_state.destroy_model_parallel()
    # The cache refers to up to 32 rotary embeddings of past models, each with its context-parallel group.
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    for group in groups:
        if group in torch.distributed.distributed_c10d._world.pg_map:
            torch.distributed.destroy_process_group(group)


def dp_rank() -> int:
    """Return the index of this rank's replica."""
    return parallel_state.get_data_parallel_rank()


def dp_size() -> int:
    """Return the number of replicas."""
    return parallel_state.get_data_parallel_world_size()


def replica_ranks() -> list[int]:
    """Return the global ranks of this rank's replica; the first one is its leader."""
    ranks_of, own = torch.distributed.get_process_group_ranks, torch.distributed.get_rank()
    stage = ranks_of(parallel_state.get_tensor_and_context_parallel_group())
    stages = ranks_of(parallel_state.get_pipeline_model_parallel_group())
    # Megatron numbers tensor ranks first, then context, data and pipeline: ranks of two stages differ by a constant.
    return sorted(rank + other - own for rank in stage for other in stages)


def is_leader() -> bool:
    """Return whether this rank is the first of its replica."""
    return torch.distributed.get_rank() == replica_ranks()[0]


def dp_all_gather_object(obj: T, codec: Codec[T]) -> list[T]:
    """Return every replica's `obj`, in rank order, on every rank. All ranks of a replica must pass equal objects."""
    group = parallel_state.get_data_parallel_group()
    return all_gather(obj, codec, group) if group.size() > 1 else [obj]
