"""The run's monitor and its acts, with made-up measurements; test_injected_alarms.py has real ones."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algorithms.objective.stats import OriginGaps
from megarl.config.checks.telemetry import SourceBuckets
from megarl.config.schema.monitor import RULES
from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.run.loop.monitor import AlarmSkipsStep, AlarmStopsRun, RunMonitor, logprob_values, plan_values, rules_of
from megarl.run.step.off_policy import StepMeasures, TokenOrigins
from megarl.run.step.plan import StepPlan, plan_step
from megarl.telemetry.metrics.declarations import step_metrics
from tests.support.trainer.configs import config as config_of

ASYNC = {"mode": "async", "sync_interval": 1, "max_staleness": 4}


class Made:
    """A monitor with a pool that takes out what it is asked to, unless it must not, and steps for it."""

    def __init__(self, **changes: Any) -> None:
        settings = {"rollout__replicas": 2, "admission": ASYNC, "monitor__min_tokens": 1} | changes
        self.config = config_of("model", **settings)
        self.said: list[str] = []
        self.taken: list[int] = []
        self.refuses = False
        self.metrics = step_metrics()
        self.recorded: list[tuple[str, int, str]] = []  # rule, subject, and "begins" or how it ended
        self.memory: dict[str, float] = {}  # the values of shared GPUs
        self.monitor = self.new()

    def new(self) -> RunMonitor:
        recorder: Any = SimpleNamespace(
            metrics=self.metrics, say=self.said.append,
            alarm=lambda alarm: self.recorded.append((alarm.rule.name, alarm.subject, "begins")),
            alarm_ended=lambda *ended: self.recorded.append(ended),
        )  # fmt: skip
        return RunMonitor(self.config.monitor, self, recorder, lambda: self.memory)

    def quarantine(self, replica: int, reason: str) -> bool:
        assert f"replica_gap of replica {replica}: " in reason
        self.taken.append(replica)
        return not self.refuses

    def step(
        self, version: int, gaps: dict[int, float] | None = None, *, made: int | None = None,
        compared: dict[str, float] | None = None, rewards: tuple[float, float] = (0.0, 1.0), finish: Any = "stop",
    ) -> tuple[bool, dict[str, float]]:  # fmt: skip
        """One step at a version; `gaps`: by replica, of one token of version `made` each."""
        plan, measured = self.measured(version, gaps or {}, made, compared, rewards, finish)
        try:
            self.monitor.watch(plan, measured)
        finally:
            self.published = self.monitor.act(version + 1)
        return self.published, self.metrics.reduce()

    def measured(
        self, version: int, gaps: dict[int, float], made: int | None, compared: dict[str, float] | None,
        rewards: tuple[float, float], finish: Any,
    ) -> tuple[StepPlan, StepMeasures]:  # fmt: skip
        made = version if made is None else made
        rows = [
            Trajectory(group, index, [1], [5], [-0.5], (VersionSpan(made, 0, 1, replica=replica),), finish, reward)
            for group, replica in enumerate(gaps or [0])
            for index, reward in enumerate(rewards)
        ]
        plan = plan_step([row.tag for row in rows], self.config, dp_size=1, version=version)
        sources = TokenOrigins.of(plan.tags.values(), SourceBuckets.of(self.config))
        sums = OriginGaps.zeros(sources.buckets.size)
        for row, sources_R in zip(rows, sources.of_rows(rows, [version] * len(rows)), strict=True):
            gap = torch.tensor([gaps.get(row.versions[0].replica, 0.0)])
            sums.add(torch.zeros(1), gap, torch.ones(1, dtype=torch.bool), sources_R)
        full = {"tokens": 1.0, "ess": 1.0, "approx_kl": 0.0} | (compared or {})
        return plan, StepMeasures(sources, sums, full if gaps or compared else None)


def test_every_rule_of_the_config_is_judged_and_those_that_are_off_are_not() -> None:
    assert {rule.name for rule in rules_of(config_of("model").monitor)} == RULES.keys()
    without = config_of("model", monitor={"rules": {"ess": {"action": "off"}}}).monitor
    assert {rule.name for rule in rules_of(without)} == RULES.keys() - {"ess"}


def test_a_sick_replica_is_taken_out_at_once_and_named() -> None:
    run = Made()
    published, metrics = run.step(3, {0: 0.01, 1: 0.9})
    assert run.taken == [1] and not published
    assert metrics["monitor/quarantined"] == metrics["monitor/alarms"] == 1 and metrics["monitor/active"] == 0
    assert metrics["monitor/replica_gap_max"] == pytest.approx(0.9 / 0.03)
    assert metrics["monitor/logprob_gap"] == pytest.approx(0.455)


OFF: Any = {"action": "off"}


def test_the_beginning_and_the_end_of_an_alarm_are_recorded_once() -> None:
    """A resume between both changes nothing."""
    run = Made(monitor__rules__ess={"action": "warn", "threshold": 0.5, "patience": 2})
    for ess in (0.1, 0.1, 0.1, 0.52):  # that is beyond the threshold no more, and not better by the hysteresis
        run.step(3, compared={"ess": ess})
    assert run.recorded == [("ess", -1, "begins")]
    state = json.loads(json.dumps(run.monitor.state_dict()))
    run.monitor = run.new()
    run.monitor.load_state_dict(state)
    for ess in (0.1, 0.9, 0.9):
        run.step(4, compared={"ess": ess})
    assert run.recorded == [("ess", -1, "begins"), ("ess", -1, "its value recovered")]


@pytest.mark.parametrize(
    ("refuses", "end"),
    [
        (False, "the replica is replaced at the next publication"),
        (True, "the replica could not be taken out; it is judged again"),
    ],
)
def test_the_alarm_of_a_replica_ends_by_what_was_done_with_it(refuses: bool, end: str) -> None:
    run = Made(monitor__rules__logprob_gap=OFF, monitor__rules__ratio_tail=OFF)
    run.refuses = refuses
    _, metrics = run.step(3, {0: 0.01, 1: 0.9})
    assert run.taken == [1] and run.recorded == [("replica_gap", 1, "begins"), ("replica_gap", 1, end)]
    assert (metrics["monitor/quarantined"], metrics["monitor/alarms"]) == (not refuses, 1)


def test_an_alarm_that_stops_the_run_is_recorded() -> None:
    run = Made(monitor__rules__ess={"action": "stop", "threshold": 0.5, "patience": 1})
    with pytest.raises(AlarmStopsRun):
        run.step(3, compared={"ess": 0.1})
    assert run.recorded == [("ess", -1, "begins")]


def test_the_tokens_of_its_old_engine_are_not_judged_again() -> None:
    run = Made()
    run.step(3, {0: 0.01, 1: 0.9})
    for made in (2, 3):
        _, metrics = run.step(4, {0: 0.01, 1: 0.9}, made=made)
        assert run.taken == [1] and "monitor/replica_gap_max" not in metrics
    run.step(5, {0: 0.01, 1: 0.9}, made=4)
    assert run.taken == [1, 1]


def test_a_replica_that_is_sick_again_and_again_is_left_to_the_user() -> None:
    off = {"action": "off"}
    run = Made(monitor__rules__logprob_gap=off, monitor__rules__ratio_tail=off)
    for version in range(6):
        run.step(version, {0: 0.01, 1: 0.9})
    assert run.taken == [1, 1, 1]
    [reported] = run.said
    assert (
        reported.startswith("alarm replica_gap of replica 1: 30 is above 4")
        and "quarantined 3 times already" in reported
    )


def test_a_warning_is_said_once_while_it_lasts() -> None:
    run = Made(monitor__rules__ess={"patience": 2})
    counts = [run.step(n, compared={"ess": 0.2})[1]["monitor/alarms"] for n in range(4)]
    assert counts == [0, 1, 1, 1] and len(run.said) == 1
    assert run.said[0] == "alarm ess: 0.2 is below 0.3 for 2 steps (docs/observability/monitor.md#ess)"


def test_what_shared_gpus_keep_is_judged_too() -> None:
    run = Made(monitor__rules__residue_growth__action="stop")
    run.memory = {"residue": 1.2, "residue_growth": 0.1}
    assert [run.step(n)[1]["monitor/alarms"] for n in range(2)] == [0, 1]
    assert run.said == ["alarm residue: 1.2 is above 1.1 for 2 steps (docs/observability/monitor.md#residue)"]
    run.memory = {"residue": 1.0, "residue_growth": 0.3}
    run.step(2)
    run.step(3)
    with pytest.raises(AlarmStopsRun, match=r"alarm residue_growth: 0\.3 is above 0\.25 for 3 steps"):
        run.step(4)


@pytest.mark.parametrize(("action", "error"), [("skip", AlarmSkipsStep), ("stop", AlarmStopsRun)])
def test_the_batch_is_refused_before_the_update(action: str, error: type[Exception]) -> None:
    run = Made(monitor__rules__k3_kl={"action": action, "patience": 1})
    with pytest.raises(error, match=r"alarm k3_kl: 0\.5 is above 0\.1 in this step"):
        run.step(0, compared={"approx_kl": 0.5})
    assert run.metrics.reduce()["monitor/skipped"] == (action == "skip")


def test_a_stop_comes_before_a_skip() -> None:
    run = Made(
        monitor__rules__k3_kl={"action": "skip", "patience": 1}, monitor__rules__ess={"action": "stop", "patience": 1}
    )
    with pytest.raises(AlarmStopsRun, match="alarm ess"):
        run.step(0, compared={"approx_kl": 0.5, "ess": 0.1})


def test_a_replica_can_stop_the_run() -> None:
    run = Made(monitor__rules__replica_gap={"action": "stop"})
    with pytest.raises(AlarmStopsRun, match="alarm replica_gap of replica 1"):
        run.step(0, {0: 0.01, 1: 0.9})
    assert run.taken == []


def test_a_forced_sync_lasts_as_long_as_the_alarm() -> None:
    run = Made(monitor__rules__ess={"action": "sync", "patience": 1})
    steps = [run.step(n, compared={"ess": ess}) for n, ess in enumerate((0.2, 0.2, 0.9, 0.2))]
    assert [published for published, _ in steps] == [True, True, False, True]
    assert [metrics["monitor/forced_syncs"] for _, metrics in steps] == [1, 1, 0, 1]
    assert len(run.said) == 3 and run.said[0].endswith("; the weights are published at once")


def test_truncated_and_signal_less_shares_are_those_of_the_plan() -> None:
    """A step that trains nothing is judged too."""
    run = Made(monitor__rules__no_signal={"patience": 1}, monitor__rules__truncated={"patience": 1})
    _, metrics = run.step(0, rewards=(1.0, 1.0), finish="length")
    assert metrics["monitor/no_signal_share"] == 1.0 and "monitor/logprob_gap" not in metrics
    assert [text.split(":")[0] for text in run.said] == ["alarm truncated", "alarm no_signal"]
    plan = run.measured(0, {0: 0.0, 1: 0.0}, None, None, (0.0, 1.0), "stop")[0]
    assert plan_values(plan) == {"truncated": 0.0, "no_signal": 0.0}
    shown = replace(plan, tags={key: replace(tag, demonstrated=tag.group_id == 0) for key, tag in plan.tags.items()})
    shown.tags["0:0"] = replace(shown.tags["0:0"], finish_reason="length")
    assert plan_values(shown) == {"truncated": 0.0, "no_signal": 0.0}, "demonstrations are no responses"
    skipped = plan.skipped()
    assert skipped is not None and plan_values(skipped) == {"truncated": 0.0}, "no group was judged"


def test_a_mini_batch_of_demonstrations_tells_nothing_about_the_policy() -> None:
    """No token was sampled, so its entropy and its comparison of nothing are no values."""
    measured = StepMeasures(TokenOrigins.of([], SourceBuckets.of(config_of("model"))), OriginGaps.zeros(0))
    measured.compare_in_update({"tokens": 0.0, "entropy": 0.0, "ess": 1.0, "approx_kl": 0.0}, OriginGaps.zeros(0))
    assert logprob_values(measured, 1) == {}


def test_the_gap_of_old_tokens_may_be_larger() -> None:
    """0.3 nats is an alarm at lag 0 and none at lag 3."""
    for made, alarm in ((3, True), (0, False)):
        run = Made(monitor__rules__logprob_gap={"patience": 1})
        run.step(3, {0: 0.3, 1: 0.3}, made=made)
        assert bool(run.said) is alarm


def test_a_run_that_resumes_goes_on_with_its_alarms_and_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.run.loop.monitor.MOST_QUARANTINES", 1)
    run = Made(monitor__rules__ess={"patience": 3})
    run.step(3, {0: 0.01, 1: 0.9}, compared={"ess": 0.1})
    run.step(4, compared={"ess": 0.1})
    state = json.loads(json.dumps(run.monitor.state_dict()))
    run.monitor = run.new()
    run.monitor.load_state_dict(state)
    run.said.clear()
    run.step(5, {0: 0.01, 1: 0.9}, made=3, compared={"ess": 0.1})
    assert run.taken == [1] and run.said[0].startswith("alarm ess: ")
    run.step(6, {0: 0.01, 1: 0.9}, compared={"ess": 1.0})
    assert run.taken == [1] and "quarantined 1 times already" in run.said[-1]


def test_a_step_that_was_not_watched_changes_nothing() -> None:
    run = Made()
    assert run.monitor.act(1) is False and run.metrics.reduce() == {}
