"""The trainer's parallel layout, made from the config."""

from __future__ import annotations

from megarl.config.schema import ParallelConfig
from megarl.models.megatron.layout import Layout


def trainer_layout(parallel: ParallelConfig, gpus: int) -> Layout:
    """Return the layout of `gpus` trainer ranks under `trainer.parallel`; raises ValueError like `Layout`."""
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        sequence=parallel.sequence,
        world_size=gpus,
    )
