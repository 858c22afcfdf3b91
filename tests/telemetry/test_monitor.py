"""The state machine of alarms: patience, hysteresis, subjects, and a state that a checkpoint keeps."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.telemetry.monitor import HYSTERESIS, RUN, AlarmRule, Monitor, Reading

ESS = AlarmRule("ess", "below", 0.5, 3, "warn")
GAP = AlarmRule("replica_gap", "above", 4.0, 1, "quarantine")


def alarms_of(monitor: Monitor, values: list[float], rule: str = "ess") -> list[str]:
    """Return a sign for each step: a dot for no alarm, `!` where one begins, `+` where it goes on."""
    said = []
    for value in values:
        found = monitor.judge([Reading(rule, value)])
        said.append("." if not found else "!" if found[0].begins else "+")
    return said


def test_the_side_of_the_threshold() -> None:
    above = AlarmRule("ess", "above", 0.5, 1, "warn")
    assert "".join(alarms_of(Monitor([above]), [0.5, 0.51, 0.46, 0.51, 0.45, 0.51])) == ".!.+.!"


def test_an_alarm_says_what_when_and_where_to_read_on() -> None:
    monitor = Monitor([ESS, GAP])
    for _ in range(2):
        monitor.judge([Reading("ess", 0.25)])
    found = monitor.judge([Reading("ess", 0.25), Reading("replica_gap", 31.5, 1), Reading("replica_gap", 1.0, 0)])
    assert [each.text for each in found] == [
        "alarm ess: 0.25 is below 0.5 for 3 steps (docs/observability/monitor.md#ess)",
        "alarm replica_gap of replica 1: 31.5 is above 4 in this step (docs/observability/monitor.md#replica_gap)",
    ]
    assert monitor.active == [("ess", RUN), ("replica_gap", 1)]


def test_a_replica_that_was_replaced_is_judged_from_the_beginning() -> None:
    patient = AlarmRule("replica_gap", "above", 4.0, 2, "quarantine")
    monitor = Monitor([patient, ESS])
    both = [Reading("replica_gap", 9.0, 0), Reading("replica_gap", 9.0, 1), Reading("ess", 0.1)]
    monitor.judge(both)
    monitor.forget(0)
    assert [each.subject for each in monitor.judge(both)] == [1]
    assert [each.steps for each in monitor.judge(both)] == [2, 3, 3]


def test_rules_that_are_not_there_are_not_judged_and_doubled_readings_are_refused() -> None:
    monitor = Monitor([ESS])
    assert monitor.judge([Reading("k3_kl", 1e9), Reading("replica_gap", 1e9, 3)]) == []
    with pytest.raises(ValueError, match="several readings for one rule and subject"):
        monitor.judge([Reading("ess", 0.4), Reading("ess", 0.6)])


VALUES = st.sampled_from([0.1, 0.49, 0.5, 0.52, 0.55, 0.7, math.nan])


@given(values=st.lists(VALUES, max_size=30), patience=st.integers(1, 4))
def test_an_alarm_needs_its_patience_and_lasts_until_the_value_has_recovered(
    values: list[float], patience: int
) -> None:
    """Written out as two sentences over the whole history."""
    monitor = Monitor([AlarmRule("ess", "below", 0.5, patience, "warn")])
    said = alarms_of(monitor, values)
    known = [(value, word) for value, word in zip(values, said, strict=True) if not math.isnan(value)]
    assert all(word == "." for value, word in zip(values, said, strict=True) if math.isnan(value))
    in_alarm = False
    for index, (value, word) in enumerate(known):
        row = known[max(0, index + 1 - patience) : index + 1]
        patient = len(row) == patience and all(each < 0.5 for each, _ in row)
        expected = "." if value >= 0.5 else "+" if in_alarm else "!" if patient else "."
        assert word == expected, (index, known)
        in_alarm = expected != "." or (in_alarm and value < 0.5 * (1 + HYSTERESIS))
    assert bool(monitor.active) == in_alarm


@given(
    steps=st.lists(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1.0, 3.7, 9.0])), max_size=4), max_size=12),
    cut=st.integers(0, 12),
)
def test_a_monitor_that_resumes_goes_on_as_if_it_had_not_stopped(
    steps: list[list[tuple[int, float]]], cut: int
) -> None:
    rules = [AlarmRule("replica_gap", "above", 4.0, 2, "warn"), ESS]
    whole, first, second = (Monitor(rules) for _ in range(3))
    reported = []
    for number, step in enumerate(steps):
        found = [Reading("replica_gap", value, replica) for replica, value in dict(step).items()]
        if number == cut:
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        reported.append((whole.judge(found), (first if number < cut else second).judge(found)))
    assert all(one == other for one, other in reported)
    assert len(whole.state_dict()) <= 4, "subjects that are well take no place"


def test_a_rule_that_was_taken_away_is_forgotten_at_a_resume() -> None:
    monitor = Monitor([ESS])
    monitor.judge([Reading("ess", 0.1)])
    other = Monitor([GAP])
    other.load_state_dict(monitor.state_dict())
    assert other.state_dict() == []
