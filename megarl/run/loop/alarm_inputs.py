"""The values that the monitor judges in a step, from its plan and what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.config.schema.monitor import RULES, MonitorConfig
from megarl.run.step.off_policy import StepMeasures
from megarl.run.step.plan import StepPlan
from megarl.telemetry.monitor import AlarmRule, Reading, ReplicaGap, compare_replicas

REPLICA_GAP = "replica_gap"
REPLICA_FLOOR = 0.03  # what the other replicas' mean counts as at least, in nats: engines are never equal to the bit


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
    if measured.compared is None or not measured.compared["tokens"]:  # nothing that an engine has sampled
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
    """Return the comparison of each replica with the others at equal lag, where there are others.

    `version`: that of the weights with which the tokens of lag 0 agree. `engine_since`: the first version that the
    present engine of a replica can have, of those that were replaced; older tokens are of the engine before.
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
