"""Compares the policy that sampled a step's tokens, possibly with older weights, with the policy that the step updates.

The engines' log-probs are compared with the trainer's over all tokens, and by origin: replica and version lag. Before
an update, masks remove tokens, and the interpolated proximal policy is set. Every rank derives the same origin buckets
from the tags of the batch, so the ranks' sums can be added.

Shapes: `_R` the response tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megarl.algorithms.correction.apply import importance_weights, interpolation
from megarl.algorithms.correction.config import CorrectionSpec
from megarl.algorithms.objective.objective import term_mask
from megarl.algorithms.objective.stats import NO_SOURCE, SAMPLING, Gap, LossStats, OriginGaps
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.checks.telemetry import SourceBuckets
from megarl.queue.streams import OLD_LOGPROBS, PROXIMAL_ALPHA, ROLLOUT_LOGPROBS, SOURCES
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample

_LENGTHS: Codec[dict[str, int]] = codec_of(dict[str, int])
_VECTORS: Codec[list[list[float]]] = codec_of(list[list[float]])


@dataclass(frozen=True)
class OriginComparison:
    """The comparison over all tokens, by lag, and by replica and lag. Entries without tokens are left out.

    `by_replica` has only replicas with a slot.
    """

    whole: Gap
    by_lag: Mapping[int, Gap]
    by_replica: Mapping[int, Mapping[int, Gap]]


@dataclass(frozen=True)
class TokenOrigins:
    """The buckets of one step. `slot_of`: the slots of the replicas that have one, by index."""

    buckets: SourceBuckets
    slot_of: Mapping[int, int]

    @classmethod
    def of(cls, tags: Iterable[SampleTag], buckets: SourceBuckets) -> TokenOrigins:
        """Return the buckets of a step with these tags. If there are more replicas than slots, the newest have them."""
        replicas = sorted({replica for tag in tags for replica in tag.replicas}, reverse=True)
        return cls(buckets, {replica: slot for slot, replica in enumerate(sorted(replicas[: buckets.slots - 1]))})

    def of_rows(self, rows: Sequence[Trajectory], versions: Sequence[int]) -> list[torch.Tensor]:
        """Return for each row the bucket of each response token, int64 [R]: parts of one tensor.

        `versions`: for each row, that of the weights with which its tokens are compared. A token that no span covers
        was not sampled, and has NO_SOURCE.
        """
        lengths = [len(row.response_ids) for row in rows]
        # One array for all: a step has hundreds of rows, and one costs more to make than to fill.
        sources = np.full(sum(lengths), NO_SOURCE, dtype=np.int64)
        index_of: dict[tuple[int, int], int] = {}
        end = 0
        for row, length, version in zip(rows, lengths, versions, strict=True):
            begin, end = end, end + length
            for span in row.versions:
                place = span.replica, version - span.counts_as
                if (index := index_of.get(place)) is None:
                    index = index_of[place] = self._index(*place)
                sources[begin + span.start : min(begin + span.end, end)] = index
        return list(torch.from_numpy(sources).split(lengths)) if rows else []

    def _index(self, replica: int, lag: int) -> int:
        return self.buckets.index(self.slot_of.get(replica, self.buckets.slots - 1), lag)

    def compare(self, gaps: OriginGaps) -> OriginComparison:
        """Return the comparison of all tokens in `gaps`, and its parts."""
        filled = gaps.filled()
        replica_of = {slot: replica for replica, slot in self.slot_of.items()}
        of_lag: dict[int, list[list[float]]] = {}
        of_replica: dict[int, dict[int, Gap]] = {}
        for bucket, row in filled.items():
            slot, lag = divmod(bucket, self.buckets.lags)
            of_lag.setdefault(lag, []).append(row)
            if slot in replica_of:
                of_replica.setdefault(replica_of[slot], {})[lag] = Gap.of([row])
        return OriginComparison(
            whole=Gap.of(list(filled.values())),
            by_lag={lag: Gap.of(of_lag[lag]) for lag in sorted(of_lag)},
            by_replica=dict(sorted(of_replica.items())),
        )


@dataclass
class StepMeasures:
    """The measurements of a step just before its first update changes the weights; equal on every rank.

    `compared`: engine (old) against trainer (new) over all compared tokens, by the names of `LossStats.means`; None if
    the step makes no update. `gaps`: the same by origin, changed only by the methods; later updates of the step add
    theirs. `entropy`: of the policy, in nats per token; None if it was not measured.
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
    def begin(cls, tags: Iterable[SampleTag], buckets: SourceBuckets) -> StepMeasures:
        """Return the measurements known before anything is computed. `tags`: those of the whole batch."""
        return cls(TokenOrigins.of(tags, buckets), OriginGaps.zeros(buckets.size))

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
        everyone = _gather_stats(LossStats.merge(parts), own.sums_BK.flatten(), own.maxima_B)
        for _, vectors in everyone:
            self.add_gaps(OriginGaps.from_vectors(*vectors))
        self.compared = LossStats.merge(stats for stats, _ in everyone).means()

    def compare_in_update(self, values: Mapping[str, float], gaps: OriginGaps | None) -> None:
        """Adopt the results of the first update: its metrics and `gaps`; None if a pass has compared all tokens."""
        self.entropy = values.get("entropy") if values["tokens"] else None
        if gaps is not None:
            self.compared, self.gaps, self._by_source = engine_against_trainer(values), gaps, None

    def add_gaps(self, gaps: OriginGaps) -> None:
        """Add the comparison of another rank, or of a later update of the step."""
        self.gaps.merge(gaps)
        self._by_source = None


def engine_against_trainer(values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the first update's comparison of the engine's log-probs (old) with the trainer's (new).

    Without a correction its ratio compares them. With one, its ratio has the trainer's log-probs on both sides.
    """
    compared = {name.removeprefix(SAMPLING): value for name, value in values.items() if name.startswith(SAMPLING)}
    return compared or values


def _gather_stats(stats: LossStats, *more: torch.Tensor) -> list[tuple[LossStats, list[torch.Tensor]]]:
    """Return the statistics of every replica, and `more` vectors of each, fp64. Collective."""
    own = [vector.tolist() for vector in (stats.sum_vector(), stats.max_vector(), *more)]
    everyone = parallel.dp_all_gather_object(own, _VECTORS)
    found = ([torch.tensor(vector, dtype=torch.float64) for vector in part] for part in everyone)
    return [(LossStats.from_vectors(sums_K, maxima_M), others) for sums_K, maxima_M, *others in found]


def reject_before_updates(
    samples: Mapping[str, TrainSample], correction: CorrectionSpec
) -> tuple[dict[str, int], dict[str, float]]:
    """Remove the tokens that the masks leave out from the loss masks of this replica's samples. Collective.

    Returns the number of tokens that each sample of any replica still trains, and `correction/*` over the tokens before
    masking. The samples must have the trainer's log-probs.
    """
    parts, own = [LossStats.zeros()], {}
    for key, sample in samples.items():
        proximal_R, sampling_R = sample.streams[OLD_LOGPROBS], sample.streams[ROLLOUT_LOGPROBS]
        trained_R = torch.ones_like(proximal_R, dtype=torch.bool) if sample.loss_mask_R is None else sample.loss_mask_R
        cuts = torch.tensor([0, proximal_R.numel()], dtype=torch.int32)
        judged_R = term_mask("rl", trained_R.bool(), sample.streams)  # not demonstrations, for example
        weights = importance_weights(proximal_R, sampling_R, judged_R, correction, cu_seqlens=cuts)
        stats = LossStats.of_pair(sampling_R, proximal_R, judged_R, cuts)
        stats.add_correction(weights, stats)
        parts.append(stats)
        sample.loss_mask_R = trained_R & ~weights.rejected  # only judged tokens are rejected
        own[key] = sample.trained_tokens
    numbers = LossStats.merge(stats for stats, _ in _gather_stats(LossStats.merge(parts)))
    kept = {key: value for part in parallel.dp_all_gather_object(own, _LENGTHS) for key, value in part.items()}
    return kept, numbers.means() | numbers.correction_means()


def set_interpolation(
    samples: Sequence[TrainSample], rows: Mapping[str, Trajectory], *, version: int, updates: int
) -> None:
    """Give the samples of an update the stream `proximal_alpha`.

    `version`: that of the weights before the first update of the step; `updates`: made since then.
    """
    for sample in samples:
        sample.streams[PROXIMAL_ALPHA] = interpolation(token_lags(rows[sample.key], version), updates)


def token_lags(row: Trajectory, version: int) -> list[int]:
    """Return for each response token the number of updates between the weights that sampled it and `version`.

    0 for tokens that the model did not sample.
    """
    lags = [0] * len(row.response_ids)
    for span in row.versions:
        lags[span.start : span.end] = [version - span.counts_as] * (span.end - span.start)
    return [lag if sampled else 0 for lag, sampled in zip(lags, row.response_mask, strict=True)]
