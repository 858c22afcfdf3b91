"""The comparison of the engines' log-probs with the trainer's in one step: of all tokens, and by their source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megarl.algorithms.objective.stats import SAMPLING, LossStats
from megarl.algorithms.objective.token_origin import OriginGaps
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.schema import Config
from megarl.queue.streams import OLD_LOGPROBS, SOURCES
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.run.step.token_origin import OriginComparison, TokenOrigins
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample

_VECTORS: Codec[list[list[float]]] = codec_of(list[list[float]])
_Compared = tuple[LossStats, OriginGaps]


def _encode_compared(compared: _Compared) -> bytes:
    stats, gaps = compared
    vectors = (stats.sum_vector(), stats.max_vector(), gaps.sums_BK.flatten(), gaps.maxima_B)
    return _VECTORS.encode([vector.tolist() for vector in vectors])


def _decode_compared(content: bytes) -> _Compared:
    sums_K, maxima_M, sums, maxima_B = (torch.tensor(part, dtype=torch.float64) for part in _VECTORS.decode(content))
    return LossStats.from_vectors(sums_K, maxima_M), OriginGaps.from_vectors(sums, maxima_B)


_COMPARED = Codec(_encode_compared, _decode_compared)


@dataclass
class StepMeasures:
    """Holds what a step has measured when its first update is about to change the weights; equal on every rank.

    `compared`: engine (old) against trainer (new) over all compared tokens, by the names of `LossStats.means`; None if
    the step makes no update. `gaps`: the same by source, changed by the methods alone; those of later updates of the
    step are added when they have been made. `entropy`: of the policy, in nats per token; None if it was not measured.
    """

    sources: TokenOrigins
    gaps: OriginGaps
    compared: Mapping[str, float] | None = None
    entropy: float | None = None
    _by_source: OriginComparison | None = field(default=None, init=False, repr=False)

    @property
    def by_source(self) -> OriginComparison:
        """The comparison by source, of the updates so far."""
        if self._by_source is None:
            self._by_source = self.sources.compare(self.gaps)
        return self._by_source

    @classmethod
    def begin(cls, tags: Iterable[SampleTag], config: Config) -> StepMeasures:
        """Return what is known before anything is computed. `tags`: those of the whole batch."""
        sources = TokenOrigins.of(tags, config)
        return cls(sources, OriginGaps.zeros(sources.buckets.size))

    def compare_in_pass(self, samples: Mapping[str, TrainSample], rows: Mapping[str, Trajectory]) -> None:
        """Compare the engine's log-probs with those of a pass of the trainer, over all sampled tokens. Collective.

        `samples` and `rows`: this replica's, by key.
        """
        parts, own = [LossStats.zeros()], OriginGaps.zeros(self.sources.buckets.size)
        for key, sample in samples.items():
            if rows[key].demonstrated:  # no engine has scored it
                continue
            engine_R = torch.tensor(rows[key].rollout_logprobs, dtype=torch.float32)
            sampled_R = torch.tensor(rows[key].response_mask, dtype=torch.bool)
            cuts = torch.tensor([0, engine_R.numel()])
            trainer_R = sample.streams[OLD_LOGPROBS]
            parts.append(LossStats.of_pair(engine_R, trainer_R, sampled_R, cuts))
            own.add(engine_R, trainer_R, sampled_R, sample.streams[SOURCES])
        everyone = parallel.dp_all_gather_object((LossStats.merge(parts), own), _COMPARED)
        for _, gaps in everyone:
            self.add_gaps(gaps)
        self.compared = LossStats.merge(stats for stats, _ in everyone).means()

    def compare_in_update(self, values: Mapping[str, float], gaps: OriginGaps | None) -> None:
        """Take over what the first update has found: its metrics and `gaps`; None if a pass has compared all."""
        self.entropy = values.get("entropy") if values["tokens"] else None
        if gaps is not None:
            self.compared, self.gaps, self._by_source = engine_against_trainer(values), gaps, None

    def add_gaps(self, gaps: OriginGaps) -> None:
        """Add what another rank, or a later update of the step, has compared."""
        self.gaps.merge(gaps)
        self._by_source = None


def engine_against_trainer(values: Mapping[str, float]) -> Mapping[str, float]:
    """Return what the first update of a step tells about the engine's log-probs (old) and the trainer's (new).

    Without a correction its ratio compares them. With one, its ratio has the trainer's log-probs on both sides.
    """
    compared = {name.removeprefix(SAMPLING): value for name, value in values.items() if name.startswith(SAMPLING)}
    return compared or values
