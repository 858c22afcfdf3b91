"""Down-samples many series while they are read, to the lowest, highest and mean value of each bucket of rows.

A peak of one row stays visible in a run of any length, and memory does not grow with the run. Pure.

Shapes: N rows, C columns (one per series), B buckets.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Buckets(NamedTuple):
    """Consecutive buckets of rows, all [B, C] in float64; NaN, and known 0, if a column has no value in a bucket.

    `known`: how many rows have a value. `total`: the sum of their values.
    """

    low: Floats
    high: Floats
    total: Floats
    known: Floats

    @property
    def mean(self) -> Floats:
        """The mean of each bucket [B, C]; NaN without values."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.known > 0, self.total / self.known, np.nan)

    @property
    def number(self) -> int:
        """The number of buckets B."""
        return len(self.known)


# How to join values of several buckets, and the values of an empty column.
_JOINS = (np.fmin, np.fmax, np.add, np.add)
_MISSING = (np.nan, np.nan, 0.0, 0.0)


def merge(buckets: Buckets, starts: NDArray[np.int64]) -> Buckets:
    """Return merged buckets that begin at the buckets `starts`, the first of which is 0."""
    return Buckets(*(join.reduceat(each, starts, axis=0) for join, each in zip(_JOINS, buckets, strict=True)))


class Envelope:
    """Collects rows in at most `limit` buckets of equal width; the last one may have fewer rows."""

    def __init__(self, columns: int, limit: int) -> None:
        """`columns`: number of columns; more can be added later. `limit`: at least 2."""
        if limit < 2:
            raise ValueError(f"an envelope needs 2 buckets, not {limit}")
        self._limit = limit
        self.width = 1  # rows of a bucket
        self.rows = 0
        self.buckets = Buckets(*[np.empty((0, columns))] * 4)

    def add_columns(self, count: int) -> None:
        """Add columns, without values in the rows so far."""
        shape = self.buckets.number, count
        wider = (np.hstack([old, np.full(shape, each)]) for old, each in zip(self.buckets, _MISSING, strict=True))
        self.buckets = Buckets(*wider)

    def add(self, rows: Floats) -> None:
        """Append rows [N, C]; NaN where a series has no value."""
        if not len(rows):
            return
        known = ~np.isnan(rows)
        single = Buckets(rows, rows, np.where(known, rows, 0.0), known.astype(np.float64))
        inside = self.rows % self.width  # rows in the last bucket, if it is not full
        starts = np.flatnonzero(np.diff((inside + np.arange(len(rows))) // self.width, prepend=-1))
        added = merge(single, starts)
        joined = Buckets(*map(np.concatenate, zip(self.buckets, added, strict=True)))
        if inside:
            joined = merge(joined, np.delete(np.arange(joined.number), self.buckets.number))
        self.rows += len(rows)
        while joined.number > self._limit:
            joined = merge(joined, np.arange(0, joined.number, 2))
            self.width *= 2
        self.buckets = joined
