"""The modes of the section `admission`: what each means in optimizer updates, and what is refused."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.derived.staleness import (
    Pace,
    evaluates_alongside_training,
    pace_notes,
    pace_of,
    pace_problems,
    refill_groups,
)
from megarl.rollout.admission.admission import Admission
from tests.support.trainer.configs import config


@pytest.mark.parametrize(
    ("section", "updates", "expected"),
    [
        ({}, 1, Pace(1, 1, 0)),
        ({}, 4, Pace(4, 4, 3)),
        ({"mode": "sync", "max_staleness": 0}, 1, Pace(1, 1, 0)),
        ({"mode": "one_step_off"}, 1, Pace(1, 1, 1)),
        ({"mode": "one_step_off"}, 4, Pace(4, 4, 7)),
        ({"mode": "stream"}, 1, Pace(1, 4, 3)),
        ({"mode": "stream", "sync_interval": 6}, 3, Pace(3, 6, 5)),
        ({"mode": "async"}, 1, Pace(1, 4, 5)),
        ({"mode": "async"}, 3, Pace(3, 6, 8)),
        # Of so many updates per step, half of an interval is less than a step.
        ({"mode": "async"}, 4, Pace(4, 4, 7)),
        ({"mode": "async"}, 8, Pace(8, 8, 15)),
        ({"mode": "stream"}, 4, Pace(4, 8, 7)),
        ({"mode": "async", "sync_interval": 2, "max_staleness": 7}, 1, Pace(1, 2, 7)),
    ],
)
def test_modes(section: dict[str, Any], updates: int, expected: Pace) -> None:
    settings = config("model", trainer__mini_batches=updates, batch__groups=8, admission=section)
    assert list(pace_problems(settings)) == [] and pace_of(settings) == expected


@pytest.mark.parametrize(
    ("section", "updates", "problem"),
    [
        ({"mode": "async", "sync_interval": 3}, 2, "admission.sync_interval: 3 updates are no whole number of steps"),
        ({"mode": "async", "sync_interval": 4, "max_staleness": 2}, 1, "admission.max_staleness: 2 is below 3"),
        ({"max_staleness": 2}, 1, "admission.mode: sync publishes after every step"),
        ({"sync_interval": 2}, 1, "admission.mode: sync publishes after every step"),
        ({"max_staleness": 0}, 2, "admission.max_staleness: 0 is below 1"),
        ({"mode": "one_step_off", "max_staleness": 3}, 1, "admission.mode: one_step_off publishes after every step"),
        ({"mode": "stream", "max_staleness": 4}, 1, "admission.mode: stream generates nothing ahead"),
        ({"max_uses": 2}, 1, "admission.max_uses: 2 steps cannot train one group, because max_staleness 0 leaves each"),
        (
            {"mode": "async", "sync_interval": 2, "max_staleness": 3, "max_uses": 3},
            2,
            "admission.max_uses: 3 steps cannot train one group, because max_staleness 3 leaves each group at most 2",
        ),
    ],
)
def test_contradictions_are_refused(section: dict[str, Any], updates: int, problem: str) -> None:
    settings = config("model", trainer__mini_batches=updates, batch__groups=8, admission=section)
    [found] = pace_problems(settings)
    assert found.startswith(problem)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_that_generates_ahead_is_told_that_it_cannot_be_deterministic(mode: str) -> None:
    settings = config("model", batch__groups=8, admission={"mode": mode}, run__deterministic=True)
    reported = [
        note for note in pace_notes(settings) if note.startswith("run.deterministic: with admission.mode: async")
    ]
    assert len(reported) == (mode == "async")


@pytest.mark.parametrize("mode", ["sync", "stream"])
def test_on_shared_gpus_nothing_overlaps_and_a_run_may_be_deterministic(mode: str) -> None:
    section = {"mode": mode, "refill": True}
    shared = config("model", rollout__share_gpus=True, run__deterministic=True, batch__groups=8, admission=section)
    assert list(pace_notes(shared)) == [] and not evaluates_alongside_training(shared)
    pace = pace_of(shared)
    assert pace.in_turns and not pace.overlaps and pace.runs_ahead is (mode == "stream")
    assert refill_groups(shared) == 10 * 8 * pace.steps_per_publication == (320 if mode == "stream" else 80)
    apart = config("model", batch__groups=8, admission=section)
    assert evaluates_alongside_training(apart) is pace_of(apart).overlaps is (mode == "stream")
    assert refill_groups(apart) == 80


@given(steps=st.integers(1, 5), updates=st.integers(1, 5), done=st.integers(0, 50))
def test_the_next_publication_by_its_definition(steps: int, updates: int, done: int) -> None:
    pace = Pace(updates, steps * updates, steps * updates - 1)
    assert pace.next_publication(done) == next(n for n in itertools.count(done + 1) if pace.publishes_after(n))


@given(mode=st.sampled_from(["one_step_off", "stream", "async"]), updates=st.integers(1, 16))
def test_by_default_every_mode_but_sync_runs_ahead(mode: str, updates: int) -> None:
    settings = config("model", trainer__mini_batches=updates, batch__groups=16, admission={"mode": mode})
    assert pace_of(settings).runs_ahead and list(pace_notes(settings)) == []


@pytest.mark.parametrize(
    ("section", "updates", "least"),
    [
        ({"mode": "async", "max_staleness": 5}, 4, 7),
        ({"mode": "async", "sync_interval": 1, "max_staleness": 0}, 1, 1),
        ({"mode": "stream", "sync_interval": 2}, 2, 3),
    ],
)
def test_a_mode_that_generates_nothing_ahead_is_noted_with_the_least_bound_that_does(
    section: dict[str, Any], updates: int, least: int
) -> None:
    [note] = pace_notes(config("model", trainer__mini_batches=updates, batch__groups=8, admission=section))
    assert f"admission.max_staleness to at least {least}" in note and "generates nothing ahead" in note
    better = {**section, "mode": "async", "max_staleness": least}
    assert not list(pace_notes(config("model", trainer__mini_batches=updates, batch__groups=8, admission=better)))


@pytest.mark.parametrize(("uses", "updates"), [(2, 1), (3, 1), (2, 2)])
def test_the_fix_for_too_many_uses_is_right(uses: int, updates: int) -> None:
    least = uses * updates - 1
    section = {"mode": "async", "sync_interval": updates, "max_staleness": least - 1, "max_uses": uses}
    settings = config("model", trainer__mini_batches=updates, batch__groups=8, admission=section)
    [found] = pace_problems(settings)
    assert f"max_staleness of at least {least}, or set max_uses to at most {uses - 1}" in found
    for fix in ({"max_staleness": least}, {"max_uses": uses - 1}):
        better = config("model", trainer__mini_batches=updates, batch__groups=8, admission=section | fix)
        assert list(pace_problems(better)) == []


@pytest.mark.parametrize(("uses", "updates"), [(2, 1), (3, 1), (2, 2)])
def test_a_bound_in_which_uses_leave_little_to_generate_ahead_is_noted(uses: int, updates: int) -> None:
    least = 2 * uses * updates - 1

    def notes(staleness: int, max_uses: int = uses) -> list[str]:
        section = {"mode": "async", "sync_interval": updates, "max_staleness": staleness, "max_uses": max_uses}
        return list(pace_notes(config("model", trainer__mini_batches=updates, batch__groups=8, admission=section)))

    [note] = notes(least - 1)
    assert (
        note.startswith("admission.max_uses") and f"admission.max_staleness to at least {least} (mode: async)" in note
    )
    assert notes(least) == notes(least - 1, max_uses=1) == []


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (2, 3, 4), (1, 4, 2)])
def test_impossible_paces_do_not_exist(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Pace(*numbers)


@given(updates=st.integers(1, 5), steps=st.integers(1, 5), more=st.integers(0, 9), made=st.integers(0, 50))
def test_the_bound_by_its_definition(updates: int, steps: int, more: int, made: int) -> None:
    """The last update of the last step within the bound has the bound's staleness or less."""
    pace = Pace(updates, updates * steps, updates * steps - 1 + more)
    count = pace.steps_within_bound(made)
    assert count * updates - 1 - made <= pace.max_staleness < (count + 1) * updates - 1 - made


@given(updates=st.integers(1, 5), steps=st.integers(1, 5), more=st.integers(0, 9), published=st.integers(0, 9))
def test_the_steps_up_to_the_next_publication_are_within_the_bound(
    updates: int, steps: int, more: int, published: int
) -> None:
    """If they were not, trainer and engines would wait for each other."""
    pace = Pace(updates, updates * steps, updates * steps - 1 + more)
    done = published * steps
    assert pace.publishes_after(done)
    following = next(n for n in range(done + 1, done + steps + 1) if pace.publishes_after(n))
    assert pace.steps_within_bound(done * updates) >= following
    assert following == done + steps


@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("ahead", range(9))
def test_generation_runs_ahead_if_more_than_a_step_may_start_at_once(updates: int, steps: int, ahead: int) -> None:
    pace = Pace(updates, steps * updates, steps * updates - 1 + ahead)
    admission = Admission(3, pace)
    admission.set_version(0)
    assert pace.runs_ahead is (len(admission.admit()) > 3)
