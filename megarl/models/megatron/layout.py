"""The parallel layout of the trainer ranks, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The sizes of Megatron's parallel groups; the data-parallel sizes follow from `world_size` (in ranks).

    `expert_tensor=None` becomes `tensor`. Raises ValueError for a layout that Megatron-Core cannot run.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.expert_tensor is None:
            object.__setattr__(self, "expert_tensor", self.tensor)
        dense, sparse = self.tensor * self.pipeline, self.etp * self.expert * self.pipeline
        for name, size in (("tensor x pipeline", dense), ("expert_tensor x expert x pipeline", sparse)):
            if self.world_size % size:
                raise ValueError(f"{self.world_size} ranks are not divisible by {name} = {size}")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence parallelism needs tensor > 1; set sequence: false")
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError("virtual_pipeline needs pipeline > 1; drop virtual_pipeline")

    @property
    def etp(self) -> int:
        """Expert tensor-parallel size; `tensor` if `expert_tensor` was None."""
        return self.expert_tensor if self.expert_tensor is not None else self.tensor

    @property
    def data(self) -> int:
        """Data-parallel size of the dense parameters."""
        return self.world_size // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the expert parameters."""
        return self.world_size // (self.etp * self.expert * self.pipeline)
