"""Down-samples many series at once, while they are read: the lowest, highest and mean value of each bucket of rows.

A peak of one row stays visible in a run of any length, and the memory does not grow with the run. Pure.

Shapes: N rows, C columns (one per series), B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Buckets:
    """Consecutive buckets of rows, each value [B, C] in float64; what a column lacks in a bucket is NaN, its count 0.

    `count`: rows of the bucket with a value. `total`: the sum of their values.
    """

    low: Floats
    high: Floats
    total: Floats
    count: Floats

    @property
    def mean(self) -> Floats:
        """The mean of the values of each bucket [B, C]; NaN where there are none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.count > 0, self.total / self.count, np.nan)

    def __len__(self) -> int:
        return len(self.count)


def reduce_rows(rows: Floats, starts: NDArray[np.int64]) -> Buckets:
    """Return the buckets of rows [N, C] that begin at the rows `starts` [B], the first of which is 0."""
    known = ~np.isnan(rows)
    return Buckets(
        np.fmin.reduceat(rows, starts, axis=0),
        np.fmax.reduceat(rows, starts, axis=0),
        np.add.reduceat(np.where(known, rows, 0.0), starts, axis=0),
        np.add.reduceat(known.astype(np.float64), starts, axis=0),
    )


def merge(buckets: Buckets, starts: NDArray[np.int64]) -> Buckets:
    """Return fewer buckets, which begin at the buckets `starts`, the first of which is 0."""
    return Buckets(
        np.fmin.reduceat(buckets.low, starts, axis=0),
        np.fmax.reduceat(buckets.high, starts, axis=0),
        np.add.reduceat(buckets.total, starts, axis=0),
        np.add.reduceat(buckets.count, starts, axis=0),
    )


def _join(first: Buckets, second: Buckets) -> Buckets:
    return Buckets(
        np.concatenate([first.low, second.low]),
        np.concatenate([first.high, second.high]),
        np.concatenate([first.total, second.total]),
        np.concatenate([first.count, second.count]),
    )


class Envelope:
    """Collects rows in at most `limit` buckets of equal width; the last one may have fewer rows."""

    def __init__(self, columns: int, limit: int) -> None:
        """`columns`: of a row; more can be added later. `limit`: at least 2."""
        if limit < 2:
            raise ValueError(f"an envelope needs 2 buckets, not {limit}")
        self._limit = limit
        self.width = 1  # rows of a bucket
        self.rows = 0
        self.buckets = reduce_empty(columns)

    def add_columns(self, count: int) -> None:
        """Add columns, which the rows so far lack."""
        length = len(self.buckets)
        missing, zero = np.full((length, count), np.nan), np.zeros((length, count))
        old = self.buckets
        self.buckets = Buckets(
            np.hstack([old.low, missing]),
            np.hstack([old.high, missing]),
            np.hstack([old.total, zero]),
            np.hstack([old.count, zero]),
        )

    def add(self, rows: Floats) -> None:
        """Append rows [N, C]; NaN where a series has no value."""
        if not len(rows):
            return
        inside = self.rows % self.width  # rows in the last bucket, if it is not full
        index = (inside + np.arange(len(rows))) // self.width
        starts = np.flatnonzero(np.diff(index, prepend=-1))
        joined = _join(self.buckets, reduce_rows(rows, starts))
        if inside:
            kept = np.delete(np.arange(len(joined)), len(self.buckets))
            joined = merge(joined, kept)
        self.rows += len(rows)
        while len(joined) > self._limit:
            joined = merge(joined, np.arange(0, len(joined), 2))
            self.width *= 2
        self.buckets = joined


def reduce_empty(columns: int) -> Buckets:
    """Return no buckets of so many columns."""
    empty = np.empty((0, columns))
    return Buckets(empty, empty, empty, empty)
