"""The limit on failures of a reward function."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.process import MIN_ERRORS, WINDOW, Failures


@given(st.lists(st.booleans(), max_size=200), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_it_is_passed_exactly_when_the_latest_samples_say_so(failed: list[bool], share: float) -> None:
    limit = Failures("f", "drop", share)
    for end, each in enumerate(failed, start=1):
        latest = failed[max(0, end - WINDOW) : end]
        expected = each and sum(latest) >= MIN_ERRORS and sum(latest) / len(latest) > share
        assert limit.note("exception" if each else None) == expected


@pytest.mark.parametrize("scored_before", [0, 100, 10_000])
def test_a_function_that_begins_to_fail_is_found_however_long_it_was_sound(scored_before: int) -> None:
    limit = Failures("f", "drop", 0.5)
    assert not any(limit.note(None) for _ in range(scored_before))
    failures = next(count for count in range(1, 1000) if limit.note("exception"))
    assert failures == (16 if scored_before == 0 else 33)
    assert limit.recent == f"{failures} of the latest {min(64, scored_before + failures)} samples"


def test_a_share_of_1_never_ends_a_run() -> None:
    limit = Failures("f", "drop", 1.0)
    assert not any(limit.note("exception") for _ in range(1000))
