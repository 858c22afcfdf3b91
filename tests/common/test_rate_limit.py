"""Reports are held back for the interval after one, and no longer."""

from hypothesis import given
from hypothesis import strategies as st

from megarl.common.clocks import RateLimit


@given(st.lists(st.floats(0, 30), max_size=30), st.floats(0.1, 20))
def test_a_report_is_allowed_exactly_if_the_last_one_is_an_interval_ago(pauses: list[float], interval_s: float) -> None:
    now, last = [0.0], float("-inf")
    limit = RateLimit(interval_s, clock=lambda: now[0])
    for pause in pauses:
        now[0] += pause
        due = now[0] - last >= interval_s
        assert limit.allows() == due
        last = now[0] if due else last
