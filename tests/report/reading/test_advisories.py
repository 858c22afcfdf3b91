"""Each advisory appears above its bound, not below, and says what would help."""

from dataclasses import replace

import pytest

from megarl.report.reading.advisories import Advisory, GpuLayout, advise
from tests.support.telemetry.reported_runs import metrics_of, step_line

LAYOUT = GpuLayout(trainer_gpus=8, trainer_unit=2, replicas=4, replica_gpus=2, synchronous=False)
SYNCHRONOUS = GpuLayout(trainer_gpus=8, trainer_unit=1, replicas=8, replica_gpus=1, synchronous=True)


def advice(steps: int = 100, layout: GpuLayout | None = LAYOUT, **changes: float) -> dict[str, Advisory]:
    metrics = metrics_of([step_line(step, **changes) for step in range(1, steps + 1)])
    return {advisory.key: advisory for advisory in advise(metrics, layout)}


def test_a_healthy_run_and_an_empty_one_have_none() -> None:
    assert advice() == {} and advise(metrics_of([]), LAYOUT) == []


@pytest.mark.parametrize(
    ("key", "name", "below", "above"),
    [
        ("aborted", "rollout__aborted_share", 0.049, 0.06),
        ("no_signal", "monitor__no_signal_share", 0.49, 0.51),
        ("truncated", "rollout__truncated_share", 0.24, 0.26),
        ("rollout_idle", "rollout__idle_ratio", 0.29, 0.31),
        ("trainer_idle", "time__generate", 2.9, 3.1),
    ],
)
def test_a_share_above_its_bound_is_reported(key: str, name: str, below: float, above: float) -> None:
    assert set(advice(**{name: below})) == set() and set(advice(**{name: above})) == {key}


def test_what_is_bad_lately_is_reported_too() -> None:
    lines = [step_line(step, rollout__truncated_share=0.0 if step <= 90 else 0.5) for step in range(1, 101)]
    (only,) = advise(metrics_of(lines), LAYOUT)
    assert only.key == "truncated" and only.title == (
        "50% of the responses were cut at the token limit over the last 10% of the steps"
    )


def test_the_split_that_would_help_is_named() -> None:
    # The trainer works 5 of 10 s (fixed 1 s of it), the engines 10: more GPUs for the engines.
    slow_rollout = advice(time__generate=5.0, time__update=3.0, time__logprobs=1.0, rollout__idle_ratio=0.0)
    text = slow_rollout["trainer_idle"].text
    assert "Now 8 for the trainer and 8 for rollout. With 6 and 10 (rollout.replicas: 5)" in text and "80%" in text
    # The trainer works 10 of 10 s (fixed 1 s of it), the engines 4: 12 GPUs for it take 1 + 9 * 8 / 12 s, 4 engines 8.
    slow_trainer = advice(time__generate=0.0, time__update=7.0, rollout__idle_ratio=0.6)["rollout_idle"].text
    assert "With 12 and 4 (rollout.replicas: 2)" in slow_trainer and "80%" in slow_trainer
    even = advice(time__generate=3.5, rollout__idle_ratio=0.2, time__step=10.0)["trainer_idle"].text
    assert "The current split (8 for the trainer and 8 for rollout) is within 3% of the best one." in even
    assert "cannot" not in text and "config" in advice(layout=None, time__generate=5.0)["trainer_idle"].text


def test_a_run_on_a_cpu_has_processes_and_no_gpus() -> None:
    layout = replace(LAYOUT, unit="processes")
    texts = [
        advice(layout=layout, time__generate=5.0, rollout__idle_ratio=idle)[key].text
        for key, idle in (("trainer_idle", 0.0), ("both_idle", 0.5))
    ]
    assert all("processes" in text and "GPU" not in text for text in texts)


def test_two_sides_that_wait_for_each_other_are_told_to_overlap() -> None:
    both = advice(time__generate=5.0, rollout__idle_ratio=0.5)
    assert set(both) == {"both_idle"} and "admission.max_staleness" in both["both_idle"].text
    assert both["both_idle"].title == (
        "The trainer waited for rollouts 50% of its time and the engines had no work for 50% of the time, "
        "over the whole run"
    )
    assert "With" not in both["both_idle"].text, "no split helps"
    in_turn = advice(layout=SYNCHRONOUS, time__generate=5.0)
    assert set(in_turn) == {"both_idle"} and "admission.mode" in in_turn["both_idle"].text


def test_sides_that_share_their_gpus_are_not_told_to_split_them() -> None:
    shared = replace(SYNCHRONOUS, shared=True)
    assert set(advice(layout=shared, time__generate=5.0, rollout__idle_ratio=0.5)) == set()


def test_the_split_of_sides_in_turn_has_the_shortest_sum() -> None:
    """It is known by hand: 1 s fixed, 7 s of passes on 8 GPUs and 2 s of generation on 8 others, of 16 in all."""
    (only,) = advice(
        layout=SYNCHRONOUS, time__generate=2.0, time__logprobs=2.0, time__update=5.0, rollout__idle_ratio=0.8
    ).values()
    assert only.key == "both_idle" and only.title == "The engines had no work for 80% of the time, over the whole run"
    lengths = {trainer: 1 + 56 / trainer + 16 / (16 - trainer) for trainer in range(1, 16)}
    best = min(lengths, key=lambda trainer: lengths[trainer])
    assert (
        best == 10
        and f"With 10 and 6 (rollout.replicas: 6) a step would take about {lengths[10] / 10:.0%}" in only.text
    )


def test_the_split_is_of_the_steps_that_are_told_of() -> None:
    """The first steps would say the opposite: there the engines make a batch in a tenth of the time."""
    early = {"time__generate": 0.0, "time__update": 7.0, "rollout__idle_ratio": 0.29}
    late = {"time__generate": 5.0, "time__update": 3.0, "time__logprobs": 1.0, "rollout__idle_ratio": 0.0}
    lines = [step_line(step, **(early if step <= 90 else late)) for step in range(1, 101)]
    (only,) = advise(metrics_of(lines), LAYOUT)
    assert only.key == "trainer_idle" and "last 10%" in only.title
    assert "With 6 and 10 (rollout.replicas: 5)" in only.text and "80%" in only.text


def test_the_idle_shares_of_both_sides_are_of_the_same_steps() -> None:
    lines = [
        step_line(step, rollout__idle_ratio=0.5 if step <= 90 else 0.0, time__generate=0.0 if step <= 90 else 5.0)
        for step in range(1, 101)
    ]
    (only,) = (each for each in advise(metrics_of(lines), LAYOUT) if each.key != "spike")
    assert only.key == "rollout_idle" and "over the whole run" in only.title


def spikes(times: dict[int, dict[str, float]], steps: int = 100) -> list[Advisory]:
    """The boxes of spikes; `times`: by step, seconds of phases that add to the step."""
    lines = []
    for step in range(1, steps + 1):
        more = times.get(step, {})
        changes = {f"time__{phase}": seconds for phase, seconds in more.items()}
        lines.append(step_line(step, **changes, time__step=10.0 + sum(more.values())))
    return [each for each in advise(metrics_of(lines), LAYOUT) if each.key == "spike"]


def test_a_spike_is_one_box_with_its_step_and_phase() -> None:
    assert spikes({40: {"update": 14.0}}) == [], "5 s are usual"
    (spike,) = spikes({40: {"update": 150.0, "logprobs": 40.0}})
    assert spike.title == "time/update took 150 s in step 40 (median: 5 s)", "the longest phase of a step speaks for it"
    (both,) = spikes({40: {"update": 150.0}, 60: {"logprobs": 40.0}})
    assert both.title.startswith("2 steps took far longer than usual: time/update took 150 s in step 40")
    assert both.text.startswith("Also time/logprobs took 40 s in step 60 (median: 2 s). The events")


@pytest.mark.parametrize("phase", ["save", "eval", "sync"])
def test_what_comes_at_planned_steps_is_no_spike(phase: str) -> None:
    assert spikes({step: {phase: 300.0} for step in range(50, 101, 50)}) == []


def test_waits_that_come_again_and_again_are_no_spikes() -> None:
    """In asynchronous training half of all steps wait, and the median of the waits is about 0."""
    assert spikes({step: {"generate": 30.0 if step % 2 else 0.001} for step in range(1, 101)}) == []
    (spike,) = spikes({77: {"generate": 300.0}})
    assert "time/generate took 300 s in step 77" in spike.title


def test_a_short_phase_has_no_spikes() -> None:
    assert spikes({40: {"queue": 9.0}}) == [], "90 times its median, and less than a step"


def test_a_sick_engine_is_named_although_the_mean_hides_it() -> None:
    lines = [step_line(step) for step in range(1, 51)]
    for line in lines:
        line |= {f"rollout/replica_tokens_per_second/{replica}": 7000.0 for replica in range(32)}
        line["rollout/replica_tokens_per_second/17"] = 2000.0
    (only,) = advise(metrics_of(lines), LAYOUT)
    assert only.key == "slow_replica" and "1 of 32 engines" in only.title and "replica 17: 2,000" in only.text
    assert advice(**{"rollout__replica_tokens_per_second__1": 4000.0}) == {}
