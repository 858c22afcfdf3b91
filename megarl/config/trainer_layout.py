"""The trainer's parallel layout as the config gives it."""

from __future__ import annotations

from megarl.config.schema import ParallelConfig
from megarl.models.layout import Layout


def trainer_layout(parallel: ParallelConfig, gpus: int) -> Layout:
    """The layout of `gpus` trainer ranks under `trainer.parallel`. ValueError as for `Layout`."""
    return Layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        virtual_pipeline=parallel.virtual_pipeline,
        expert=parallel.expert,
        expert_tensor=parallel.expert_tensor,
        sequence=parallel.sequence,
        world_size=gpus,
    )
