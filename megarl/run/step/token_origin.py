"""The sources of the tokens of a step, which are replica and version lag: the bucket of each token, and back.

Every rank finds the same slots from the tags of the batch, so the sums of all ranks can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megarl.algorithms.objective.token_origin import NO_SOURCE, Gap, OriginGaps
from megarl.config.checks.telemetry import SourceBuckets
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag, Trajectory


@dataclass(frozen=True)
class OriginComparison:
    """The comparison of all tokens, and of those of each lag, and of each replica by lag, without what has no tokens.

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
    def of(cls, tags: Iterable[SampleTag], config: Config) -> TokenOrigins:
        """Return the buckets of a step with these tags. If there are more replicas than slots, the newest have them."""
        buckets = SourceBuckets.of(config)
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
