"""The bins of response lengths: of a round width, and around every length."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.page.samples_section import length_edges, round_up


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=60))
def test_bins_of_lengths_count_every_response_once(lengths: list[int]) -> None:
    edges = length_edges(max(lengths))
    assert np.histogram(lengths, edges)[0].sum() == len(lengths) and len(edges) <= 42 and max(lengths) < edges[-1]
    width = edges[1] - edges[0]
    assert width == round_up(width), "the width of a bin is a round number"


@given(st.floats(0.01, 1e7))
def test_a_round_number_is_the_next_one(value: float) -> None:
    result = round_up(value)
    assert result >= value and str(result)[0] in "125" and set(str(result)[1:]) <= {"0"}
    assert result == 1 or result / 2.5 < value
