"""The section `monitor`: which values raise an alarm, and what the alarm does (docs/monitor.md).

`threshold`, `patience` and `action` mean the same in each rule; only their defaults differ.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megarl.config.section import Section

AlarmAction = Literal["off", "warn", "skip", "sync", "stop"]
ReplicaAction = Literal["off", "warn", "quarantine", "stop"]

_PATIENCE = "Steps in a row, of those in which the value is known, that must be beyond the threshold."
_ACTION = "What the alarm does; off: the rule is not judged."


class EffectiveSampleSizeRule(Section):
    """Too small an effective sample size of the ratios trainer / engine (`mismatch/ess`)."""

    threshold: float = Field(0.3, gt=0, lt=1, description="Alarm below it; 1 is on policy.")
    patience: int = Field(3, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class KLRule(Section):
    """Too large a KL from the engine to the trainer (`mismatch/k3_kl`)."""

    threshold: float = Field(0.1, gt=0, description="Alarm above it, in nats per token.")
    patience: int = Field(3, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class RatioTailRule(Section):
    """Too many tokens whose probability differs by a factor of more than 2 (`mismatch/ratio_tail_share`)."""

    threshold: float = Field(0.05, gt=0, lt=1, description="Alarm above this share of the tokens.")
    patience: int = Field(3, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class LogprobGapRule(Section):
    """Log-probs of engine and trainer that differ by more than their weights can explain (`monitor/logprob_gap`)."""

    threshold: float = Field(
        0.1,
        gt=0,
        description="Alarm above it: mean |engine - trainer| of the tokens of the smallest version lag in the step, in "
        "nats per token, divided by 1 + lag.",
    )
    patience: int = Field(2, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class ReplicaGapRule(Section):
    """A replica whose log-probs differ from the trainer's by far more than those of the others, at equal lag."""

    threshold: float = Field(
        4.0,
        gt=1,
        description="Alarm above it: mean |engine - trainer| of the replica's tokens over that of the median of the "
        "other replicas at the same version lags (`mismatch/replica/{replica}/*`).",
    )
    floor: float = Field(
        0.03, gt=0, description="What the others' mean counts as at least, in nats: engines are never equal to the bit."
    )
    patience: int = Field(1, ge=1, description=_PATIENCE)
    action: ReplicaAction = Field(
        "quarantine",
        description=_ACTION + " quarantine: the replica gets no more requests, and the next publication replaces it; "
        "the last one for training stays.",
    )
    most_quarantines: int = Field(
        3, ge=0, description="How often one replica is quarantined in a run; further alarms of it only warn."
    )


class TruncatedRule(Section):
    """Too many responses cut at the token limit (`rollout/truncated_share`)."""

    threshold: float = Field(0.25, gt=0, lt=1, description="Alarm above this share of the responses.")
    patience: int = Field(3, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class NoSignalRule(Section):
    """Too many groups whose rewards are all equal (`monitor/no_signal_share`)."""

    threshold: float = Field(0.8, gt=0, lt=1, description="Alarm above this share of the groups that can be judged.")
    patience: int = Field(5, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class EntropyRule(Section):
    """A policy that is about to have one answer only (`policy/entropy`; see `telemetry.entropy_every`)."""

    threshold: float = Field(0.003, gt=0, description="Alarm below it, in nats per token.")
    patience: int = Field(3, ge=1, description=_PATIENCE)
    action: AlarmAction = Field("warn", description=_ACTION)


class MonitorConfig(Section):
    """Alarms on what each step measures, and what they do (docs/monitor.md)."""

    min_tokens: int = Field(
        256, ge=1, description="Tokens of a replica, or of a version lag, below which its log-probs are not judged."
    )
    hysteresis: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="An alarm ends when the value is better than the threshold by this share of it. Until then each "
        "step beyond the threshold acts at once, without patience.",
    )
    max_skipped_steps: int = Field(
        5, ge=0, description="Steps that a start of the run may skip by `skip`; the next one ends the run."
    )
    ess: EffectiveSampleSizeRule = Field(default_factory=EffectiveSampleSizeRule)
    k3_kl: KLRule = Field(default_factory=KLRule)
    ratio_tail: RatioTailRule = Field(default_factory=RatioTailRule)
    logprob_gap: LogprobGapRule = Field(default_factory=LogprobGapRule)
    replica_gap: ReplicaGapRule = Field(default_factory=ReplicaGapRule)
    truncated: TruncatedRule = Field(default_factory=TruncatedRule)
    no_signal: NoSignalRule = Field(default_factory=NoSignalRule)
    entropy: EntropyRule = Field(default_factory=EntropyRule)
