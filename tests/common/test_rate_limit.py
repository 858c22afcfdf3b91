"""Reports are held back for the interval after one, and counted."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megarl.common.rate_limit import RateLimit


@given(st.lists(st.floats(0, 30), max_size=30), st.floats(0.1, 20))
def test_two_reports_are_an_interval_apart_and_the_first_is_never_held_back(
    pauses: list[float], interval_s: float
) -> None:
    now = [0.0]
    limit, allowed = RateLimit(interval_s, clock=lambda: now[0]), []
    for pause in pauses:
        now[0] += pause
        if limit.allows():
            allowed.append(now[0])
            assert limit.held_back == 0
    assert not pauses or allowed[0] == pauses[0]
    assert all(after - before >= interval_s for before, after in itertools.pairwise(allowed))
    assert len(allowed) <= len(pauses)
