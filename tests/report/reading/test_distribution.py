"""Quantiles with a known error, and bins that count every value once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.reading.distribution import RELATIVE_ERROR, LogHistogram, bins_of, length_edges, round_up

SECONDS = st.lists(st.floats(1e-5, 1e6), min_size=1, max_size=80)


@given(SECONDS, st.floats(0, 1))
def test_a_quantile_is_near_the_value_at_its_rank(values: list[float], q: float) -> None:
    histogram = LogHistogram()
    for start in range(0, len(values), 7):
        histogram.add(np.array(values[start : start + 7]))
    exact = sorted(values)[math.floor(q * (len(values) - 1))]
    assert histogram.quantile(q) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)


@given(SECONDS, st.floats(1e-4, 1e5))
def test_values_clearly_above_a_bound_are_counted_and_those_below_are_not(values: list[float], bound: float) -> None:
    histogram = LogHistogram()
    histogram.add(np.array(values))
    at_least = sum(value > bound * (1 + 3 * RELATIVE_ERROR) for value in values)
    at_most = sum(value > bound * (1 - 3 * RELATIVE_ERROR) for value in values)
    assert at_least <= histogram.above(bound) <= at_most


@given(st.floats(1e-4, 1e5))
def test_one_percent_on_either_side_of_a_bound_is_told_apart(bound: float) -> None:
    histogram = LogHistogram()
    histogram.add(np.array([0.99 * bound, 1.01 * bound]))
    assert histogram.above(bound) == 1


def test_zero_and_missing_values_do_not_count() -> None:
    histogram = LogHistogram()
    histogram.add(np.array([0.0, math.nan, -1.0]))
    assert len(histogram) == 0 and math.isnan(histogram.quantile(0.5))
    histogram.add(np.array([2.0, 0.0]))
    assert len(histogram) == 1 and histogram.above(0.0) == 1


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=60))
def test_bins_of_lengths_count_every_response_once(lengths: list[int]) -> None:
    edges = length_edges(max(lengths))
    bins = bins_of(lengths, edges)
    assert sum(bins.counts) == len(lengths) and len(bins.counts) <= 41
    width = edges[1] - edges[0]
    for number, count in enumerate(bins.counts):
        upper = edges[number + 1] + (number == len(bins.counts) - 1)
        assert count == sum(edges[number] <= length < upper for length in lengths)
    assert width == round_up(width), "the width of a bin is a round number"


@given(st.floats(0.01, 1e7))
def test_a_round_number_is_the_next_one(value: float) -> None:
    result = round_up(value)
    assert result >= value and str(result)[0] in "125" and set(str(result)[1:]) <= {"0"}
    assert result == 1 or result / 2.5 < value
