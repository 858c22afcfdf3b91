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
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
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
        if self.pipeline == 1 and (self.first_stage_layers or self.last_stage_layers):
            raise ValueError("first_stage_layers and last_stage_layers need pipeline > 1; drop them")

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Return how many of the model's `layers` each pipeline stage has.

        The stages between the first and the last have as many each. Raises ValueError where that is impossible, or
        where a stage cannot be split into `virtual_pipeline` equal chunks.
        """
        first, last = self.first_stage_layers, self.last_stage_layers
        given = [count for count in (first, last) if count is not None]
        stages, rest = self.pipeline - len(given), layers - sum(given)
        chunks = self.virtual_pipeline or 1
        if stages < 0 or rest < stages or (rest % stages if stages else rest):
            raise ValueError(f"{rest} layers cannot be split over {stages} pipeline stages")
        between = rest // stages if stages else 0
        counts = [between] * (stages + len(given))
        counts[0], counts[-1] = first or counts[0], last or counts[-1]
        odd = next((count for count in counts if count % chunks), None)
        if odd is not None:
            raise ValueError(
                f"the {odd} layers of a pipeline stage cannot be split into {chunks} virtual_pipeline chunks"
            )
        return tuple(counts)

    def chunk_layers(self, layers: int, stage: int, chunk: int) -> range:
        """Return the global layer numbers of a model chunk of a pipeline stage. Raises like `stage_layers`."""
        counts, chunks = self.stage_layers(layers), self.virtual_pipeline or 1
        first = (chunk * layers + sum(counts[:stage])) // chunks
        return range(first, first + counts[stage] // chunks)

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
