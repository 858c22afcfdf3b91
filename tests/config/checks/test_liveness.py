"""Configs that would wait forever are refused; that no others are is shown on admission's states (its own tests)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.checks.engine import liveness_problems
from megarl.config.derived.staleness import Pace
from tests.support.machines.admission_states import steps_without_room
from tests.support.trainer.configs import config


class UncheckedPace(Pace):
    """A pace whose numbers may be impossible."""

    def __post_init__(self) -> None: ...


@given(updates=st.integers(1, 4), steps=st.integers(1, 4), staleness=st.integers(0, 40))
def test_a_pace_is_accepted_exactly_if_every_step_has_room(updates: int, steps: int, staleness: int) -> None:
    numbers = (updates, updates * steps, staleness)
    without = steps_without_room(UncheckedPace(*numbers))
    # Updates that are missing at the end of the period take whole steps away.
    missing = max(0, updates * steps - (staleness + 1))
    assert without == list(range(steps - -(-missing // updates), steps))
    try:
        Pace(*numbers)
    except ValueError:
        assert without
    else:
        assert not without


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"admission__refill": True}, ""),
        ({"algorithm__filter_zero_variance": False}, ""),
        (
            {"admission__refill": True, "algorithm__filter_zero_variance": False},
            "admission.refill: it replaces the groups that algorithm.filter_zero_variance drops, which is off",
        ),
    ],
)
def test_configs(changes: dict[str, Any], problem: str) -> None:
    chosen = config("model", batch={"groups": 3, "samples_per_group": 4}, **changes)
    found = list(liveness_problems(chosen.admission, chosen.algorithm))
    assert [each.startswith(problem) for each in found] == ([True] if problem else [])
