"""The parts of metrics.jsonl that the report keeps."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megarl.common.rundir import rotating_lines
from megarl.report.reading import metrics_file
from megarl.report.reading.metrics_file import NO_SIGNAL, mean_interval, read_metrics
from megarl.telemetry.sinks.sinks import JsonlSink
from tests.support.telemetry.reported_runs import evaluation_line, metrics_of, small_run, step_line


def test_series_keep_their_steps_and_missing_values_stay_missing() -> None:
    lines = [step_line(step, policy__entropy=None if step % 2 else float(step)) for step in range(1, 21)]
    lines[4]["policy/kl_ref"] = 0.25
    metrics = metrics_of(lines)
    assert metrics.steps == 20 and metrics.width == 1
    assert metrics.mean("step").tolist() == list(range(1, 21))
    entropy = metrics.mean("policy/entropy")
    assert np.isnan(entropy[::2]).all() and entropy[1::2].tolist() == list(range(2, 21, 2))
    assert metrics.has("policy/kl_ref") and not metrics.has("correction/ess") and not metrics.has("rollout/cut")
    assert metrics.average("policy/entropy", last=0.1) == 20.0 and metrics.average("policy/entropy") == 11.0
    assert metrics.largest("rollout/queue_depth") == 6.0 and math.isnan(metrics.largest("rollout/cut"))


def test_a_family_grows_in_the_middle_of_a_run_and_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(metrics_file.FAMILIES, "rollout/replica_tokens_per_second/", 5)
    lines = [step_line(step) for step in range(1, 31)]
    for line in lines[15:]:
        line |= {f"rollout/replica_tokens_per_second/{replica}": 10.0 for replica in range(4, 40)}
    metrics = metrics_of(lines, buckets=8)
    prefix = "rollout/replica_tokens_per_second/"
    assert metrics.family(prefix)[:4] == [f"{prefix}{number}" for number in range(4)]
    assert len(metrics.family(prefix)) == 5
    kept = {name[len(prefix) :] for name in metrics.family(prefix)}
    assert sorted(metrics.left_out[prefix]) == sorted({str(replica) for replica in range(40)} - kept)
    added = metrics.family(prefix)[-1]
    assert metrics.average(added) == 10.0 and metrics.sum(added) == 150.0
    assert metrics.sum("rollout/version_lag_tokens/1") == 30 * 150_000


def test_the_interval_of_the_reward_is_that_of_its_groups() -> None:
    metrics = metrics_of([step_line(step, reward__mean=0.5, reward__stderr=0.1) for step in range(1, 9)])
    low, high = mean_interval(metrics)
    assert low == pytest.approx(0.5 - 1.96 * 0.1) and high == pytest.approx(0.5 + 1.96 * 0.1)
    joined = metrics_of([step_line(step, reward__mean=0.5, reward__stderr=0.1) for step in range(1, 9)], buckets=2)
    assert mean_interval(joined)[0] == pytest.approx(0.5 - 1.96 * 0.1 / math.sqrt(4)), "4 independent steps per bucket"
    old = metrics_of([step_line(1, reward__std=0.5, batch__samples=100.0) | {"reward/stderr": None}])
    assert mean_interval(old)[1][0] - old.mean("reward/mean")[0] == pytest.approx(1.96 * 0.05)


def test_groups_without_signal_are_those_that_the_run_has_filtered() -> None:
    """All rewards from 1 to 2 count as right, and those below 1 as wrong; that says nothing about signal."""
    graded = {"groups__solve_all": 1.0, "groups__solve_none": 0.0, "groups__filtered": 6.0, "groups__trained": 26.0}
    assert metrics_of([step_line(1, **graded, monitor__no_signal_share=0.1875)]).average(NO_SIGNAL) == 0.1875
    older = step_line(1, **graded) | {"monitor/no_signal_share": None}
    assert metrics_of([older]).average(NO_SIGNAL) == 6 / 32
    assert math.isnan(metrics_of([older | {"groups/filtered": 0.0, "groups/trained": 0.0}]).average(NO_SIGNAL))


def test_spikes_are_the_longest_phase_of_their_step_the_longest_first() -> None:
    lines = [step_line(step, time__update=60.0 if step == 77 else 5.0) for step in range(1, 201)]
    lines[76]["time/logprobs"] = 40.0
    lines[119]["time/logprobs"] = 30.0
    found = metrics_of(lines).spikes
    assert [(each.step, each.phase, each.seconds, each.median) for each in found] == [
        (77, "update", 60.0, 5.0), (120, "logprobs", 30.0, 2.0),
    ]  # fmt: skip
    assert metrics_of([]).spikes == []


def test_a_share_of_the_whole_time_counts_long_steps_more() -> None:
    lines = [step_line(1, time__step=10.0, time__generate=0.0), step_line(2, time__step=90.0, time__generate=80.0)]
    assert metrics_of(lines).ratio(metrics_file.TRAINER_WAIT, "time/step") == pytest.approx(0.8)


def test_evaluations_are_kept_apart_and_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_file, "MOST_EVALUATIONS", 10)
    lines: list[dict] = []
    for step in range(0, 500):
        lines += [evaluation_line(step, 0.5), step_line(step + 1)]
    points = metrics_of(lines).evaluations["heldout"]
    steps = [point.step for point in points]
    assert len(points) <= 20 and steps[0] == 0 and steps[-1] > 400 and steps == sorted(steps)
    assert points[1].seconds == 10.0 * points[1].step and points[0].values["greedy"] == 0.5
    assert metrics_of(lines).steps == 500


def test_a_file_that_is_being_written_is_read_to_its_last_line(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", steps=30)
    file = run / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + json.dumps(step_line(31)).encode()[:200])
    metrics = read_metrics(file)
    assert metrics.steps == 30 and [point.step for point in metrics.evaluations["heldout"]] == [0, 30]
    assert read_metrics(tmp_path / "absent").steps == 0


def test_older_parts_are_read_before_the_newest(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", 8 * 20_000)
    for step in range(1, 60):
        sink.write_object(step_line(step))
    parts = rotating_lines.older_parts(sink.path)
    assert len(parts) > 2 and parts[0][0] == 0, "nothing was deleted yet"
    metrics = read_metrics(sink.path)
    assert metrics.steps == 59 and metrics.low("step")[0] == 1 and metrics.largest("step") == 59
