"""The section `monitor`: which values raise an alarm, and what the alarm does (docs/observability/monitor.md)."""

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field, field_validator

from megarl.common.options import Section

RuleName = Literal[
    "ess", "k3_kl", "ratio_tail", "logprob_gap", "replica_gap", "truncated", "no_signal", "entropy", "residue",
    "residue_growth",
]  # fmt: skip
Side = Literal["above", "below"]
AlarmAction = Literal["off", "warn", "skip", "sync", "stop"]
ReplicaAction = Literal["off", "warn", "quarantine", "stop"]


class RuleDefaults(NamedTuple):
    """A rule's defaults: an alarm if its value is `side` of `threshold`."""

    side: Side
    threshold: float
    patience: int
    action: str = "warn"
    least: float = 0.0  # smallest threshold, exclusive
    most: float = math.inf


RULES: dict[RuleName, RuleDefaults] = {
    "ess": RuleDefaults("below", 0.3, 3, most=1),
    "k3_kl": RuleDefaults("above", 0.1, 3),
    "ratio_tail": RuleDefaults("above", 0.05, 3, most=1),
    "logprob_gap": RuleDefaults("above", 0.1, 2),
    "replica_gap": RuleDefaults("above", 4.0, 1, "quarantine", least=1),
    "truncated": RuleDefaults("above", 0.25, 3, most=1),
    "no_signal": RuleDefaults("above", 0.8, 5, most=1),
    "entropy": RuleDefaults("below", 0.003, 3),
    "residue": RuleDefaults("above", 1.1, 2),
    "residue_growth": RuleDefaults("above", 0.25, 3),
}


class RuleConfig(Section):
    """One rule, by its name in docs/observability/monitor.md, which has the meaning and the defaults of each.

    A key that is not set keeps its default.
    """

    threshold: float = Field(description="Alarm beyond it; the rule says on which side.")
    patience: int = Field(ge=1, description="Consecutive steps with a known value that must be beyond the threshold.")
    action: Literal["off", "warn", "skip", "sync", "stop", "quarantine"] = Field()
    """What the alarm does; off: the rule is not judged. quarantine is only for `replica_gap`, which has no skip or
    sync: the replica gets no more requests, and the next publication replaces it. The last one for training stays."""


class MonitorConfig(Section):
    """Alarms on what each step measures, and what they do (docs/observability/monitor.md)."""

    rules: dict[RuleName, RuleConfig] = Field(default_factory=dict, validate_default=True)
    """Changes to single rules, e.g. `monitor.rules.ess.action=stop`."""
    min_tokens: int = Field(256, ge=1)
    """Fewest tokens of a replica, or of a version lag, on which its log-probs are judged."""

    @field_validator("rules", mode="before")
    @classmethod
    def _with_defaults(cls, given: object) -> object:
        """Complete the given rules, and add the others."""
        if not isinstance(given, Mapping):
            return given
        complete: dict[str, Any] = dict(given)  # unknown rules are refused by their type
        for name, default in RULES.items():
            rule = given.get(name) or {}
            if isinstance(rule, Mapping):
                complete[name] = {key: getattr(default, key) for key in RuleConfig.model_fields} | dict(rule)
        return complete

    @field_validator("rules")
    @classmethod
    def _possible(cls, rules: dict[RuleName, RuleConfig]) -> dict[RuleName, RuleConfig]:
        """Refuse thresholds and actions that a rule cannot have."""
        for name, rule in rules.items():
            default, actions = RULES[name], get_args(ReplicaAction if name == "replica_gap" else AlarmAction)
            if not default.least < rule.threshold < default.most:
                limit = f" and below {default.most:g}" if default.most < math.inf else ""
                raise ValueError(f"{name}.threshold is {rule.threshold:g}; it must be above {default.least:g}{limit}")
            if rule.action not in actions:
                raise ValueError(f"{name}.action is {rule.action}; this rule has {', '.join(actions)}")
        return rules
