"""The parallel layout of the trainer ranks, as plain numbers."""

import functools
import re
from dataclasses import dataclass

UNEVEN_STAGES = ("first_stage_layers", "last_stage_layers", "pipeline_layout")  # fields that make stages unequal


@functools.cache
def layers_of_text(text: str, pipeline: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Parse Megatron's `pipeline_model_parallel_layout`; return the layers of each stage, for each of `chunks`.

    `E` is the embedding, `t` a layer, `L` the output layer, `|` separates stages; `t*3` and `(tt|)*4` repeat. Raises
    ValueError for any other text, and unless there are `pipeline` x `chunks` stages.
    """
    unrolled = text.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"):
        unrolled = re.sub(repeated, lambda found: found[1] * int(found[2]), unrolled)
    if not re.fullmatch(r"E[t|]*L", unrolled):
        raise ValueError(
            f"{text!r} is not E (embedding), a t for each layer and L (output layer) in this order, with | between "
            "stages; repeat with t*3 or (tt|)*4"
        )
    counts = [part.count("t") for part in unrolled.split("|")]
    if len(counts) != pipeline * chunks:
        raise ValueError(
            f"{text!r} has {len(counts)} stages, but pipeline x virtual_pipeline is {pipeline} x {chunks}; change one "
            "of them"
        )
    return tuple(tuple(counts[start : start + pipeline]) for start in range(0, len(counts), pipeline))


@dataclass(frozen=True)
class Layout:
    """Sizes of Megatron's parallel groups; the data-parallel sizes follow from `world_size` (in ranks).

    `expert_tensor=None` becomes `tensor`. `pipeline_layout`: see `layers_of_text`. Raises ValueError for a layout that
    Megatron-Core cannot run.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.expert_tensor is None:
            object.__setattr__(self, "expert_tensor", self.tensor)
        dense, sparse = self.tensor * self.context * self.pipeline, self.etp * self.expert * self.pipeline
        for name, size in (("tensor x context x pipeline", dense), ("expert_tensor x expert x pipeline", sparse)):
            if self.world_size % size:
                raise ValueError(f"{self.world_size} ranks are not divisible by {name} = {size}")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence parallelism needs tensor > 1; set sequence: false")
        if self.virtual_pipeline is not None and self.pipeline == 1:
            raise ValueError("virtual_pipeline needs pipeline > 1; drop virtual_pipeline")
        uneven = self.first_stage_layers or self.last_stage_layers
        if self.pipeline == 1 and (uneven or self.pipeline_layout):
            raise ValueError("first_stage_layers, last_stage_layers and pipeline_layout need pipeline > 1; drop them")
        if self.pipeline_layout is not None:
            if uneven:
                raise ValueError("pipeline_layout sets every stage; drop first_stage_layers and last_stage_layers")
            layers_of_text(self.pipeline_layout, self.pipeline, self.virtual_pipeline or 1)

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Return how many of the model's `layers` each pipeline stage has.

        Without `pipeline_layout` the stages between the first and the last are equal. Raises ValueError if they cannot
        be, if a stage cannot be split into `virtual_pipeline` equal chunks, or if `pipeline_layout` has another number
        of layers.
        """
        return tuple(map(sum, zip(*self._chunk_counts(layers), strict=True)))

    def chunk_layers(self, layers: int, stage: int, chunk: int) -> range:
        """Return the global layer numbers of a model chunk of a pipeline stage. Raises like `stage_layers`."""
        counts = self._chunk_counts(layers)
        first = sum(map(sum, counts[:chunk])) + sum(counts[chunk][:stage])
        return range(first, first + counts[chunk][stage])

    def most_layers(self, layers: int) -> int:
        """Return the number of layers of the largest model chunk. Raises like `stage_layers`."""
        return max(map(max, self._chunk_counts(layers)))

    def _chunk_counts(self, layers: int) -> tuple[tuple[int, ...], ...]:
        chunks = self.virtual_pipeline or 1
        if self.pipeline_layout is None:
            counts = self._even_stages(layers)
            if odd := [count for count in counts if count % chunks]:
                raise ValueError(
                    f"the {odd[0]} layers of a pipeline stage cannot be split into {chunks} virtual_pipeline chunks"
                )
            return (tuple(count // chunks for count in counts),) * chunks
        found = layers_of_text(self.pipeline_layout, self.pipeline, chunks)
        if (total := sum(map(sum, found))) != layers:
            raise ValueError(f"{self.pipeline_layout!r} has {total} layers (t)")
        return found

    def _even_stages(self, layers: int) -> list[int]:
        first, last = self.first_stage_layers, self.last_stage_layers
        given = [count for count in (first, last) if count is not None]
        stages, rest = self.pipeline - len(given), layers - sum(given)
        if stages < 0 or rest < stages or (rest % stages if stages else rest):
            raise ValueError(f"{rest} layers cannot be split over {stages} pipeline stages")
        counts = [rest // stages if stages else 0] * (stages + len(given))
        counts[0], counts[-1] = first or counts[0], last or counts[-1]
        return counts

    @property
    def etp(self) -> int:
        """Expert tensor-parallel size; `tensor` if `expert_tensor` was None."""
        return self.expert_tensor if self.expert_tensor is not None else self.tensor

    @property
    def data(self) -> int:
        """Data-parallel size: the number of replicas, each with different samples."""
        return self.world_size // (self.tensor * self.context * self.pipeline)

    @property
    def dense_data(self) -> int:
        """Ranks that hold the same dense parameters: data-parallel size x context-parallel size."""
        return self.data * self.context

    @property
    def expert_data(self) -> int:
        """Data-parallel size of the expert parameters."""
        return self.world_size // (self.etp * self.expert * self.pipeline)
