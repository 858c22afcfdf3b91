"""Time as a watcher has seen it pass."""

import pytest

from megarl.common.clocks import WatchedTime


def test_a_pause_of_the_watcher_counts_as_one_look_and_all_else_as_it_is() -> None:
    times = iter([100.0, 101.5, 103.5, 90_000.0, 90_001.0])
    seen = WatchedTime(2.0, lambda: next(times))
    assert [seen.look() for _ in range(4)] == [pytest.approx(each) for each in (1.5, 3.5, 5.5, 6.5)]
