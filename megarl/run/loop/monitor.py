"""The monitor of a run: judges every step and acts on its alarms (docs/observability/monitor.md).

Every rank judges the same numbers and raises the same alarms, so nothing is exchanged. Rules that skip the batch or
stop the run are judged before the first update, all others after the last.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from megarl.config.schema.monitor import RULES, MonitorConfig
from megarl.run.loop.rollout_client import RolloutClient
from megarl.run.record.recorder import Recorder
from megarl.run.step.off_policy import StepMeasures
from megarl.run.step.plan import StepPlan
from megarl.telemetry.monitor import Alarm, AlarmRule, Monitor, Reading, ReplicaGap, compare_replicas
from megarl.trainer.optimizer import StepRefused

REPLICA_GAP = "replica_gap"
REPLICA_FLOOR = 0.03  # least value in nats of the other replicas' mean: engines are never equal to the bit


def rules_of(section: MonitorConfig) -> list[AlarmRule]:
    """Return the rules that are not off."""
    return [
        AlarmRule(name, RULES[name].side, rule.threshold, rule.patience, rule.action)
        for name, rule in section.rules.items()
        if rule.action != "off"
    ]


def plan_values(plan: StepPlan) -> dict[str, float]:
    """Return `truncated` and `no_signal` of the groups that no earlier step has trained, each where it is known."""
    new_tags, outcome = plan.new_tags, plan.outcome
    usable = [tag.truncated for tag in new_tags if tag.status == "ok" and not tag.demonstrated]
    demonstrated = {tag.group_id for tag in new_tags if tag.demonstrated}
    shown = demonstrated and demonstrated.intersection(plan.trained_groups)
    judged = outcome.trained + outcome.filtered - len(shown)
    return {
        **({"truncated": sum(usable) / len(usable)} if usable else {}),
        **({"no_signal": outcome.filtered / judged} if judged else {}),
    }


def logprob_values(measured: StepMeasures, min_tokens: int) -> dict[str, float]:
    """Return the values of the comparison of engine and trainer, and of the entropy, each where it is known."""
    values = {} if measured.entropy is None else {"entropy": measured.entropy}
    if measured.compared is None or not measured.compared["tokens"]:  # no engine sampled anything
        return values
    values |= {"ess": measured.compared["ess"], "k3_kl": measured.compared["approx_kl"]}
    if (whole := measured.by_source.whole).tokens:
        values["ratio_tail"] = whole.tail
    by_lag = measured.by_source.by_lag
    if fresh := [lag for lag, gap in sorted(by_lag.items()) if gap.tokens >= min_tokens]:
        values["logprob_gap"] = by_lag[fresh[0]].logprob_abs_diff / (1 + fresh[0])
    return values


def replica_values(
    measured: StepMeasures, version: int, engine_since: Mapping[int, int], min_tokens: int
) -> dict[int, ReplicaGap]:
    """Return the comparison of each replica with the others at equal lag, if there are others.

    `version`: the weights' version at lag 0. `engine_since`: for each replaced replica, the first version that its
    present engine can have; older tokens are from the engine before it.
    """
    by_replica = measured.by_source.by_replica
    means = {
        replica: {
            lag: (gap.tokens, gap.logprob_abs_diff)
            for lag, gap in by_lag.items()
            if version - lag >= engine_since.get(replica, -math.inf)
        }
        for replica, by_lag in by_replica.items()
    }
    return compare_replicas(means, min_tokens)


def readings(values: Mapping[str, float], replicas: Mapping[int, ReplicaGap]) -> list[Reading]:
    """Return what the rules judge."""
    of_run = [Reading(name, value) for name, value in values.items()]
    return of_run + [
        Reading(REPLICA_GAP, gap.excess(REPLICA_FLOOR), replica) for replica, gap in sorted(replicas.items())
    ]


_BEFORE = ("skip", "stop")
MOST_QUARANTINES = 3  # of one replica in a run; further alarms of it only warn
MOST_SKIPPED_BY_ALARMS = 5  # steps that a start of the run may skip; the next one ends the run


class AlarmSkipsStep(StepRefused):
    """An alarm with the action `skip`: the batch is not trained."""


class AlarmStopsRun(StepRefused):
    """An alarm with the action `stop`: the run ends as failed, with the weights from before the batch."""


class RunMonitor:
    """Judges the steps of a run, as a `Stateful` part. For each step: `watch`, then `act`."""

    key = "monitor"

    def __init__(
        self,
        config: MonitorConfig,
        pool: RolloutClient,
        recorder: Recorder,
        memory: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`memory`: the present values of the rules on shared GPUs, the same on every rank."""
        self._memory = memory
        self._config, self._pool, self._recorder = config, pool, recorder
        self._monitor = Monitor(rules_of(config))
        self._judges_before = any(rule.action in _BEFORE for rule in self._monitor.rules.values())
        self._quarantines: Counter[int] = Counter()
        self._engine_since: dict[int, int] = {}  # see `replica_values`, of replicas that were quarantined
        self._watched: tuple[StepPlan, StepMeasures] | None = None
        self._alarms: list[Alarm] = []  # of the present step
        self._open: set[tuple[str, int]] = set()  # alarms whose beginning is recorded and whose end is not

    def watch(self, plan: StepPlan, measured: StepMeasures) -> None:
        """Judge the rules that keep a batch from the update. Raises AlarmStopsRun or AlarmSkipsStep."""
        self._watched = (plan, measured)
        if not self._judges_before:
            return
        found = self._readings(plan, measured)[0]
        self._judge([each for each in found if self._action(each) in _BEFORE])
        for action, error in (("stop", AlarmStopsRun), ("skip", AlarmSkipsStep)):
            if reported := [alarm.text for alarm in self._alarms if alarm.rule.action == action]:
                raise error("; ".join(reported))

    def act(self, version: int) -> bool:
        """Judge the other rules and act on the alarms; return whether to publish the weights at once.

        `version`: that of the weights after the step, which is not published yet.
        """
        if self._watched is None:
            return False
        (plan, measured), self._watched = self._watched, None
        found, values = self._readings(plan, measured)
        self._judge([each for each in found if self._action(each) not in _BEFORE])
        acts = [(self._do(alarm, version), alarm) for alarm in self._alarms]
        done = Counter(act for act, _ in acts)
        self._record_ends({alarm.subject for act, alarm in acts if act == "quarantine"})
        metrics: dict[str, float] = {
            "alarms": len(self._alarms),
            "active": len(self._monitor.active),
            "skipped": done["skip"] > 0,
            "forced_syncs": done["sync"] > 0,
            "quarantined": done["quarantine"],
        }
        shown = {"logprob_gap": "logprob_gap", "no_signal": "no_signal_share"}
        metrics |= {metric: values[name] for name, metric in shown.items() if name in values}
        if gaps := [each.value for each in found if each.rule == REPLICA_GAP]:
            metrics["replica_gap_max"] = max(gaps)
        self._recorder.metrics.update(metrics, prefix="monitor/")
        self._alarms = []
        return done["sync"] > 0

    def _readings(self, plan: StepPlan, measured: StepMeasures) -> tuple[list[Reading], dict[str, float]]:
        """Return the readings of all rules, and the values of the run."""
        tokens = self._config.min_tokens
        values = {**plan_values(plan), **logprob_values(measured, tokens), **self._memory()}
        replicas = replica_values(measured, plan.version, self._engine_since, tokens)
        return readings(values, replicas), values

    def _action(self, reading: Reading) -> str:
        rule = self._monitor.rules.get(reading.rule)
        return "off" if rule is None else rule.action

    def _judge(self, values: Sequence[Reading]) -> None:
        found = self._monitor.judge(values)
        self._alarms += found
        for alarm in found:
            if alarm.begins:
                self._open.add((alarm.rule.name, alarm.subject))
                self._recorder.alarm(alarm)

    def _record_ends(self, taken_out: Set[int]) -> None:
        """Record the ends of alarms. `taken_out`: the replicas that this step has quarantined."""
        tried = {(alarm.rule.name, alarm.subject) for alarm in self._alarms}
        for rule, subject in sorted(self._open - set(self._monitor.active)):
            how = "its value recovered"
            if subject in taken_out:
                how = "the replica is replaced at the next publication"
            elif (rule, subject) in tried:
                how = "the replica could not be taken out; it is judged again"
            self._recorder.alarm_ended(rule, subject, how)
        self._open &= set(self._monitor.active)

    def _do(self, alarm: Alarm, version: int) -> str:
        """Act on an alarm, and return what was done. The user is warned when an alarm begins or acts."""
        action = alarm.rule.action
        if action == "quarantine":
            if self._quarantines[alarm.subject] >= MOST_QUARANTINES:
                if alarm.begins:
                    self._recorder.say(
                        f"{alarm.text}; it was quarantined {self._quarantines[alarm.subject]} times already: "
                        "look at its node, or drain it (`megarl pool drain`)"
                    )
                return "warn"
            self._quarantines[alarm.subject] += 1
            self._engine_since[alarm.subject] = version
            self._monitor.forget(alarm.subject)
            return action if self._pool.quarantine(alarm.subject, alarm.text) else "warn"
        if action == "sync":
            self._recorder.say(f"{alarm.text}; the weights are published at once")
        elif action == "warn" and alarm.begins:
            self._recorder.say(alarm.text)
        return action

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the rules, and of the replicas that were quarantined."""
        return {
            "rules": self._monitor.state_dict(),
            "quarantines": [list(each) for each in sorted(self._quarantines.items())],
            "engine_since": [list(each) for each in sorted(self._engine_since.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a stored state; {} is that of a new run."""
        self._monitor.load_state_dict(state.get("rules", []))
        self._open = set(self._monitor.active)  # their beginnings were recorded before the checkpoint
        self._quarantines = Counter({replica: count for replica, count in state.get("quarantines", [])})
        self._engine_since = {replica: version for replica, version in state.get("engine_since", [])}
