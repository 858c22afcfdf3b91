"""The number of sockets of a trainer rank or an engine: those of gloo, which has no lock, and rank 0's stores. Pure.

gloo (torch 2.13) opens one socket for each process group of a process, also for a group of a single rank. So the number
follows from the groups that Megatron-Core, vLLM and megarl form, and one more socket is found.
"""

from __future__ import annotations

from megarl.config.pace import pace_of
from megarl.config.schema import Config
from megarl.config.trainer_layout import trainer_layout
from megarl.models.layout import Layout

# `parallel_state.initialize_model_parallel` of Megatron-Core 0.16.1: each rank is in so many groups, beside those of
# the embeddings: one of the first and the last pipeline stage, and one, of position embeddings, of the first alone.
_MEGATRON = 15
# vLLM 0.32, distributed/parallel_state.py: world, TP, DCP, PCP, PP and DP, each for the device and for the CPU.
_VLLM = 12
_VLLM_EXPERTS = 2


def megatron_groups(layout: Layout, rank: int) -> int:
    """Return how many process groups of the parallel state a rank is in; the default group is not one of them."""
    stage = _stage(layout, rank)
    return _MEGATRON + (stage in {0, layout.pipeline - 1}) + (stage == 0)


def sends_weights(layout: Layout, rank: int) -> bool:
    """Tell whether a rank is in the group of the weight sync: the first of each stage, and of each share of experts."""
    first = rank - _stage(layout, rank) * (layout.world_size // layout.pipeline)
    return first in {layout.etp * share for share in range(layout.expert)}


def of_trainer_rank(config: Config, rank: int, *, has_saved: bool) -> int:
    """Return the number of a trainer rank that trains, on the CPU.

    Those of megarl: the default group and the one of `Peers`; with a thread that prepares batches the same for it,
    and one of the replica's ranks; the group of the weight sync. Rank 0 serves a store for the ranks, one for the
    weight sync and, from the first save on (`has_saved`), one for checkpoints.
    """
    layout = trainer_layout(config.trainer.parallel, config.trainer.gpus)
    groups = 2 + megatron_groups(layout, rank) + sends_weights(layout, rank)
    if pace_of(config).runs_ahead:
        groups += 1 + (layout.tensor * layout.pipeline > 1)
    return groups + (2 + has_saved if rank == 0 else 0)


def of_engine(*, has_experts: bool, syncs_weights: bool) -> int:
    """Return the number of a process of an engine, on the CPU: vLLM's groups, the default group and the weight sync's.

    `syncs_weights`: False for a teacher's engine.
    """
    return 1 + _VLLM + _VLLM_EXPERTS * has_experts + syncs_weights


def _stage(layout: Layout, rank: int) -> int:
    """Return the pipeline stage of a rank: Megatron-Core numbers all ranks of a stage before those of the next."""
    return rank // (layout.world_size // layout.pipeline)
