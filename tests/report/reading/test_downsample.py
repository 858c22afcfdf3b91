"""Down-sampling while reading: bounded, exact extremes and means, whatever the chunks."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.report.reading.downsample import Envelope

VALUES = st.one_of(st.floats(-1e6, 1e6), st.just(math.nan))
ROWS = st.lists(st.tuples(VALUES, VALUES), max_size=200)


def chunks(rows: list, cuts: list[int]) -> list[np.ndarray]:
    ends = sorted({min(cut, len(rows)) for cut in cuts} | {0, len(rows)})
    return [np.array(rows[start:end], dtype=float).reshape(end - start, 2) for start, end in pairwise(ends)]


@given(ROWS, st.lists(st.integers(0, 200), max_size=6), st.integers(2, 9))
@settings(deadline=None)
def test_every_bucket_has_the_extremes_and_the_mean_of_its_rows(rows: list, cuts: list[int], limit: int) -> None:
    envelope = Envelope(2, limit)
    for chunk in chunks(rows, cuts):
        envelope.add(chunk)
    width, buckets = envelope.width, envelope.buckets
    assert envelope.rows == len(rows) and buckets.number <= limit
    assert width == 1 or len(rows) > width * limit / 2, "buckets are wider than they need to be"
    assert buckets.number == math.ceil(len(rows) / width)
    for number in range(buckets.number):
        inside = rows[number * width : (number + 1) * width]
        for column in range(2):
            known = [row[column] for row in inside if not math.isnan(row[column])]
            assert buckets.known[number, column] == len(known)
            if known:
                assert buckets.low[number, column] == min(known) and buckets.high[number, column] == max(known)
                assert buckets.mean[number, column] == pytest.approx(math.fsum(known) / len(known), abs=1e-6)
            else:
                assert math.isnan(buckets.low[number, column]) and math.isnan(buckets.mean[number, column])


def test_one_peak_in_a_long_series_stays_visible() -> None:
    envelope = Envelope(1, 100)
    for start in range(0, 100_000, 1000):
        rows = np.zeros((1000, 1))
        if start == 42_000:
            rows[7] = 9.0
        envelope.add(rows)
    assert envelope.buckets.number <= 100 and envelope.width == 1024
    assert envelope.buckets.high.max() == 9.0 and int(envelope.buckets.high.argmax()) == 42_007 // 1024


def test_a_new_column_has_no_values_before() -> None:
    envelope = Envelope(1, 4)
    envelope.add(np.ones((6, 1)))
    envelope.add_columns(1)
    envelope.add(np.full((6, 2), 5.0))
    assert envelope.buckets.known.sum(axis=0).tolist() == [12, 6]
    assert envelope.buckets.low[0].tolist()[0] == 1.0 and math.isnan(envelope.buckets.low[0, 1])
    assert envelope.buckets.high[-1].tolist() == [5.0, 5.0]


def test_a_limit_that_allows_no_halving_is_refused() -> None:
    with pytest.raises(ValueError, match="2 buckets"):
        Envelope(1, 1)
