"""Distributions in bounded memory: a histogram of any positive values with a known relative error, and bins for a plot.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RELATIVE_ERROR = 0.001  # of a quantile
_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_SMALLEST, _LARGEST = 1e-6, 1e9  # what lies outside counts as the nearest of them
_FIRST = math.floor(math.log(_SMALLEST) / _GROWTH)
_BINS = math.ceil(math.log(_LARGEST) / _GROWTH) - _FIRST + 1


class LogHistogram:
    """Counts positive values in bins whose ends grow by a constant factor; values of 0 and below are left out.

    It is DDSketch with a fixed range (Masson, Rim and Lee, 2019): any quantile is within `RELATIVE_ERROR` of a value at
    that rank.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS, dtype=np.int64)

    def add(self, values: NDArray[np.float64]) -> None:
        """Count values [N]; NaN is left out."""
        kept = values[values > 0]
        if len(kept):
            bins = np.ceil(np.log(np.clip(kept, _SMALLEST, _LARGEST)) / _GROWTH).astype(np.int64) - _FIRST
            self._counts += np.bincount(np.clip(bins, 0, _BINS - 1), minlength=_BINS)

    def __len__(self) -> int:
        return int(self._counts.sum())

    def quantile(self, q: float) -> float:
        """Return the value at rank floor(q (n - 1)) of n values in order, within `RELATIVE_ERROR`; NaN without any."""
        if not len(self):
            return math.nan
        rank = math.floor(q * (len(self) - 1))
        number = int(np.searchsorted(np.cumsum(self._counts), rank, side="right"))
        upper = math.exp((number + _FIRST) * _GROWTH)
        return upper * (1 - RELATIVE_ERROR)

    def above(self, bound: float) -> int:
        """Return how many values are larger than `bound`, those within `RELATIVE_ERROR` of it perhaps too."""
        if bound <= 0:
            return len(self)
        number = math.ceil(math.log(min(max(bound, _SMALLEST), _LARGEST)) / _GROWTH) - _FIRST
        return int(self._counts[number + 1 :].sum())


@dataclass(frozen=True)
class Bins:
    """A histogram: bin i holds the values in [edges[i], edges[i + 1]), the last one its upper end too."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


def bins_of(values: Sequence[float], edges: Sequence[float]) -> Bins:
    """Count values in bins that cover them all."""
    counts, _ = np.histogram(np.asarray(values, dtype=np.float64), np.asarray(edges, dtype=np.float64))
    return Bins(tuple(float(edge) for edge in edges), tuple(int(count) for count in counts))


def length_edges(longest: int, most: int = 40) -> list[float]:
    """Return the edges of at most `most` bins of whole tokens, from 0 to above `longest`, with a round width."""
    width = max(1, round_up((longest + 1) / most))
    return [float(edge) for edge in range(0, longest + width + 1, width)]


def round_up(value: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, 50, ... that is at least `value`."""
    power = 10 ** max(0, math.floor(math.log10(max(value, 1.0))))
    return next(int(power * step) for step in (1, 2, 5, 10) if power * step >= value)
