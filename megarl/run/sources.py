"""The sources of the tokens of a step, which are replica and version lag: the bucket of each token, and back.

Every rank finds the same slots from the tags of the batch, so the sums of all ranks can be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from megarl.algorithms.source_gaps import NO_SOURCE, Gap, SourceGaps
from megarl.config.monitor_checks import SourceBuckets
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag, Trajectory


@dataclass(frozen=True)
class TokenSources:
    """The buckets of one step. `slot_of`: the slots of the replicas that have one, by index."""

    buckets: SourceBuckets
    slot_of: Mapping[int, int]

    @classmethod
    def of(cls, tags: Iterable[SampleTag], config: Config) -> TokenSources:
        """Return the buckets of a step with these tags. If there are more replicas than slots, the newest have them."""
        buckets = SourceBuckets.of(config)
        replicas = sorted({replica for tag in tags for replica in tag.replicas}, reverse=True)
        return cls(buckets, {replica: slot for slot, replica in enumerate(sorted(replicas[: buckets.slots - 1]))})

    def of_row(self, row: Trajectory, version: int) -> torch.Tensor:
        """Return the bucket of each response token, int64 [R].

        `version`: that of the weights with which the tokens are compared. A token that no span covers was not sampled,
        and has NO_SOURCE.
        """
        other = self.buckets.slots - 1
        sources_R = np.full(len(row.response_ids), NO_SOURCE, dtype=np.int64)  # its slices cost less than torch's
        for span in row.versions:
            slot = self.slot_of.get(span.replica, other)
            sources_R[span.start : span.end] = self.buckets.index(slot, version - span.counts_as)
        return torch.from_numpy(sources_R)

    def whole(self, gaps: SourceGaps) -> Gap:
        """Return the comparison of all tokens."""
        return Gap.of(list(gaps.filled().values()))

    def by_lag(self, gaps: SourceGaps) -> dict[int, Gap]:
        """Return the comparison of all tokens of each lag, without those that have none."""
        rows: dict[int, list[list[float]]] = {}
        for bucket, row in gaps.filled().items():
            rows.setdefault(bucket % self.buckets.lags, []).append(row)
        return {lag: Gap.of(rows[lag]) for lag in sorted(rows)}

    def by_replica(self, gaps: SourceGaps) -> dict[int, dict[int, Gap]]:
        """Return the comparison of each replica's tokens by lag, without replicas and lags that have none."""
        replica_of = {slot: replica for replica, slot in self.slot_of.items()}
        found: dict[int, dict[int, Gap]] = {}
        for bucket, row in gaps.filled().items():
            slot, lag = divmod(bucket, self.buckets.lags)
            if slot in replica_of:
                found.setdefault(replica_of[slot], {})[lag] = Gap.of([row])
        return dict(sorted(found.items()))
