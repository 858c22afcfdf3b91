import math

import pytest

from megarl.telemetry.metrics.declarations import GROUPS, REGISTRY, step_metrics
from megarl.telemetry.metrics.registry import Metric, Registry, StepMetrics, UndeclaredMetricError, reduce
from tools.docs.metrics_page import metrics_page

SMALL = Registry(
    [
        Metric("a/sum", "1", "sum", "."),
        Metric("a/mean", "1", "mean", "."),
        Metric("a/max", "1", "max", "."),
        Metric("a/min", "1", "min", "."),
        Metric("a/last", "1", "last", "."),
        Metric("a/weighted", "1", "weighted", "."),
        Metric("eval/{set}/pass@{k}", "1", "last", "."),
    ]
)


def test_each_reducer() -> None:
    step = StepMetrics(SMALL)
    for value in (3.0, 1.0, 2.0):
        for name in ("sum", "mean", "max", "min", "last"):
            step.record(f"a/{name}", value)
        step.record("a/weighted", value, weight=value)
    assert step.reduce() == {
        "a/sum": 6.0, "a/mean": 2.0, "a/max": 3.0, "a/min": 1.0, "a/last": 2.0, "a/weighted": 14.0 / 6.0,
    }  # fmt: skip
    assert step.reduce() == {}  # nothing of one step leaks into the next


def test_undeclared_names_are_refused_with_a_hint() -> None:
    with pytest.raises(UndeclaredMetricError, match="'policy/entropi' is not declared; did you mean policy/entropy"):
        step_metrics().record("policy/entropi", 1.0)
    with pytest.raises(UndeclaredMetricError):
        StepMetrics(SMALL).update({"sum": 1.0, "nothing": 2.0}, prefix="a/")


def test_templates_match_one_part_of_a_name() -> None:
    assert SMALL.lookup("eval/gsm8k/pass@4").reducer == "last"
    for wrong in ("eval/a/b/pass@4", "eval//pass@4", "eval/x/pass@", "eval/x/pass"):
        with pytest.raises(UndeclaredMetricError):
            SMALL.lookup(wrong)


def test_weights_where_they_belong() -> None:
    step = StepMetrics(SMALL)
    with pytest.raises(ValueError, match="needs a weight"):
        step.record("a/weighted", 1.0)
    with pytest.raises(ValueError, match="takes no weight"):
        step.record("a/sum", 1.0, weight=2.0)
    step.update({"weighted": 4.0, "sum": 1.0}, prefix="a/", weight=3.0)
    assert step.reduce() == {"a/weighted": 4.0, "a/sum": 1.0}


def test_no_weight_at_all_is_not_a_number() -> None:
    assert math.isnan(reduce("weighted", [(5.0, 0.0)]))


def test_a_name_is_declared_once() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        Registry([Metric("x", "1", "sum", "."), Metric("x", "1", "mean", ".")])


def test_declarations_are_complete() -> None:
    page = metrics_page()
    for metric in REGISTRY:
        assert metric.name.split("/")[0] in GROUPS, metric.name
        assert metric.meaning.endswith(".") and metric.unit
        assert f"`{metric.name}`" in page
    for group in GROUPS:
        assert any(metric.name.startswith(f"{group}/") for metric in REGISTRY), group


def test_what_depends_on_the_clock_is_marked() -> None:
    for metric in REGISTRY:
        clock = metric.unit in ("s", "tokens/s", "GiB/s", "TFLOP/s")
        assert metric.timing or not clock, metric.name
        assert not metric.timing or metric.name.split("/")[0] not in ("reward", "groups", "batch", "policy", "eval")


def test_what_counts_faults_is_marked_by_itself() -> None:
    """It depends neither on the clock nor on the machine, and a deterministic run does not repeat it."""
    faults = {metric.name for metric in REGISTRY if metric.faults}
    assert faults == {
        "rollout/groups_kept", "rollout/groups_redone", "rollout/rebuilds", "rollout/replicas_alive",
        "rollout/replicas_idle", "rollout/replicas_lost", "rollout/workers_alive", "rollout/workers_lost",
        "sync/restarted_replicas", "total/failed_writes", "total/groups_rolled_back",
    }  # fmt: skip
    for metric in REGISTRY:
        assert not (metric.timing and metric.unit in ("groups", "replicas", "times", "workers", "writes")), metric.name
        assert metric.reproducible == (not metric.timing and not metric.faults)
    assert "| `rollout/replicas_alive` ⚠ |" in metrics_page() and "| `time/step` ⏱ |" in metrics_page()
