"""Packs one replica's samples into micro-batches on the CPU, without communication: within an update, or ahead of it.

What all replicas must agree on (the lengths of all samples, and the streams that all of them have) is given by the
caller. Streams that are known only when the update begins, such as advantages, are added to a batch that was packed
ahead when it is brought to the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megarl.algorithms.objective.aggregation import GlobalCounts
from megarl.algorithms.objective.terms import WEIGHT_STREAMS
from megarl.config.schema import Config
from megarl.models.megatron.layout import Layout
from megarl.trainer.batch import MicroBatch, TrainSample, check_samples, pack
from megarl.trainer.packing import plan_micro_batches


class SampleShape(NamedTuple):
    """The lengths of a sample, of which all replicas must know."""

    tokens: int  # of prompt and response
    trained_tokens: int

    @classmethod
    def of(cls, sample: TrainSample) -> SampleShape:
        """Return the shape of a sample."""
        return cls(sample.length, sample.trained_tokens)


@dataclass(frozen=True)
class PackedBatch:
    """The micro-batches of this replica on the CPU, and counts of the trained tokens over all replicas.

    `late`: names of the streams that the micro-batches lack, and that every sample has when they are used.
    """

    indices: list[list[int]]  # per micro-batch, of this replica's samples
    micro_batches: list[MicroBatch]
    counts: GlobalCounts
    tokens: int  # of all samples of all replicas, prompts included
    non_empty: int  # micro-batches of all replicas that hold samples
    late: tuple[str, ...] = ()

    @property
    def weighted(self) -> bool:
        """True if samples bring weights of a term, so that its counts are others. Equal on all replicas."""
        names = {*self.late, *(name for batch in self.micro_batches for name in batch.streams)}
        return not names.isdisjoint(WEIGHT_STREAMS)

    def complete(self, samples: Sequence[TrainSample], device: torch.device) -> list[MicroBatch]:
        """Return the micro-batches on `device`, with the late streams of `samples`, of which they were made.

        Raises ValueError if there is another number of samples.
        """
        if (packed := sum(map(len, self.indices))) != len(samples):
            raise ValueError(f"{packed} samples were packed, but {len(samples)} are to be used")
        return [batch.with_streams(samples, self.late).to(device) for batch in self.micro_batches]


@dataclass(frozen=True)
class PackedStep:
    """The samples of one replica in a step by key, and what was packed of them ahead of it.

    `updates`: one for each mini-batch, or none if the step packs them; `whole`: all samples, for passes over the whole
    step, or None if such a pass packs them.
    """

    samples: dict[str, TrainSample]
    updates: list[PackedBatch] = field(default_factory=list)
    whole: PackedBatch | None = None


@dataclass(frozen=True)
class Packer:
    """The rules by which a layout's replicas pack samples.

    `token_limit`: tokens of a micro-batch; `stages`: pipeline stages, `interleaved` if they hold several chunks each;
    `align`: each micro-batch is padded to a multiple of it (TP under sequence parallelism).
    """

    vocab_size: int
    max_tokens: int  # of a response, the constant length of `GlobalCounts`
    token_limit: int
    stages: int
    interleaved: bool
    align: int

    @classmethod
    def of(cls, config: Config, layout: Layout, vocab_size: int) -> Packer:
        """Return the rules of a config and its layout."""
        return cls(
            vocab_size=vocab_size,
            max_tokens=config.sampling.max_tokens,
            token_limit=config.trainer.token_limit,
            stages=layout.pipeline,
            interleaved=layout.virtual_pipeline is not None,
            align=layout.tensor if layout.sequence else 1,
        )

    def pack(
        self,
        samples: Sequence[TrainSample],
        shapes: Sequence[Sequence[SampleShape]],
        replica: int,
        streams: Sequence[str],
        late: Sequence[str] = (),
    ) -> PackedBatch:
        """Pack the samples of one replica.

        `shapes[d]`: those of the samples of replica d, equal on all ranks; `streams`: names of the streams to pack,
        which all samples of all replicas have; `late`: of those that they will have.

        Raises ValueError if a sample is wrong, or not of the shape that the other replicas were told.
        """
        check_samples(samples, self.vocab_size)
        for sample, told in zip(samples, shapes[replica], strict=True):
            if SampleShape.of(sample) != told:
                raise ValueError(f"sample {sample.key} has {SampleShape.of(sample)}, but all replicas count {told}")
        plans = plan_micro_batches(
            [[shape.tokens for shape in each] for each in shapes],
            self.token_limit,
            multiple_of=self.stages if self.interleaved else 1,
            minimum=self.stages,  # fewer leave stages idle, and fail in an interleaved schedule
        )
        mine = plans[replica]
        return PackedBatch(
            indices=mine,
            micro_batches=[pack(samples, indices, self.align, streams) for indices in mine],
            counts=GlobalCounts.of([shape.trained_tokens for each in shapes for shape in each], self.max_tokens),
            tokens=sum(shape.tokens for each in shapes for shape in each),
            non_empty=sum(bool(indices) for plan in plans for indices in plan),
            late=tuple(late),
        )
