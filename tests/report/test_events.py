"""Slow trajectories and faults from the events of a run."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.report.reading import run_events as report_events
from megarl.report.reading.run_events import pair, read_run_events
from megarl.telemetry.trace.files import RunEvent
from megarl.telemetry.trace.lines import EventLine
from tests.support.telemetry.reported_events import slow, write_events
from tests.support.telemetry.reported_runs import START


def event(name: str, at: float, kind: str, replica: int | None = None, text: str = "", **more: str) -> RunEvent:
    args = {"kind": kind, "text": text} | more
    return RunEvent("controller", "host", name, at, 0.0, 1, None, None, None, replica, args, False)


def test_a_fault_has_the_first_recovery_of_its_kind_and_replica() -> None:
    faults = pair(
        [
            event("recovery", 9.0, "engine", 1, "replica 1 serves again"),
            event("fault", 1.0, "engine", 0, "zero"),
            event("fault", 2.0, "engine", 1, "one"),
            event("fault", 3.0, "group", None, "group 7"),
            event("recovery", 0.5, "engine", 0, "before any fault"),
        ]
    )
    assert [(fault.text, fault.outcome) for fault in faults] == [
        ("zero", ""), ("one", "replica 1 serves again"), ("group 7", ""),
    ]  # fmt: skip
    assert faults[1].after_s == 7.0
    twice = [event("fault", 1.0, "group", text="first"), event("fault", 2.0, "group", text="second")]
    first, second = pair([*twice, event("recovery", 3.0, "group", text="back")])
    assert (first.outcome, second.outcome) == ("back", "")


def test_an_alarm_ends_with_the_recovery_of_its_own_rule() -> None:
    faults = pair(
        [
            event("fault", 1.0, "alarm", text="ess is low", rule="ess"),
            event("fault", 2.0, "alarm", text="k3 is high", rule="k3_kl"),
            event("recovery", 3.0, "alarm", text="its value recovered", rule="k3_kl"),
        ]
    )
    assert [(fault.text, fault.outcome) for fault in faults] == [
        ("ess is low", ""), ("k3 is high", "its value recovered"),
    ]  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from(["fault", "recovery"]), st.sampled_from("ab"), st.integers(0, 1)), max_size=20)
)
def test_a_recovery_ends_one_fault_and_none_before_it(made: list[tuple[str, str, int]]) -> None:
    events = [event(name, float(at), kind, replica, str(at)) for at, (name, kind, replica) in enumerate(made)]
    faults = pair(events)
    assert len(faults) == sum(name == "fault" for name, *_ in made)
    used = Counter(fault.outcome for fault in faults if fault.outcome)
    assert set(used.values()) <= {1}
    for fault in faults:
        if fault.outcome:
            recovery = made[int(fault.outcome)]
            assert int(fault.outcome) > fault.at and recovery[0] == "recovery" and recovery[1] == fault.kind


def test_the_slowest_are_kept_and_discarded_work_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_events, "SLOWEST", 3)
    seconds = [5.0, 1.0, 9.0, 7.0, 2.0, 99.0]
    lines = [slow(step, each, decode=each / 4, tool=each / 2) for step, each in enumerate(seconds, start=1)]
    write_events(tmp_path, "steps", lines)
    rolled = EventLine("rolled_back", 1_000_000, 0, 5, args={"since": START})
    fault = EventLine("fault", 10, 0, 3, args={"kind": "engine", "text": "replica 0 is lost"})
    write_events(tmp_path, "rare", [rolled, fault])
    found = read_run_events(tmp_path)
    assert [each.seconds for each in found.slow] == [9.0, 7.0, 5.0], "step 6 was discarded by a resume"
    assert found.slow[0].cause == "tool" and found.slow[0].parts[2] == 2.25 and found.slow[0].tokens == 500
    assert [each.text for each in found.faults] == ["replica 0 is lost"]
    assert found.recorded and not read_run_events(tmp_path.parent).recorded
