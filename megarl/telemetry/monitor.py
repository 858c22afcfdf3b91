"""The state machine of alarms: takes the values of a step, returns alarms. Uses no clock and no processes.

A rule is judged once a step for each subject (the run, or a replica) with a known value. An alarm begins after
`patience` judged steps in a row beyond the threshold. It ends when the value is better than the threshold by the
hysteresis; until then every step beyond the threshold is an alarm, without patience.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config.schema.monitor import Side

Means = tuple[int, float]  # (tokens, mean |engine - trainer| of them)


@dataclass(frozen=True)
class ReplicaGap:
    """The comparison of one replica with the others, over the `tokens` at lags that can be compared.

    `gap`: its mean |engine - trainer|, in nats; `expected`: that of the others.
    """

    tokens: int
    gap: float
    expected: float

    def excess(self, floor: float) -> float:
        """Return how many times larger the gap is than expected; `expected` counts as at least `floor`."""
        return self.gap / max(self.expected, floor)


def compare_replicas(by_replica: Mapping[int, Mapping[int, Means]], min_tokens: int) -> dict[int, ReplicaGap]:
    """Compare the log-prob gap of each replica to the trainer with that of the others, at equal lags.

    Tokens of older weights differ more, and a slow replica has more of them. So a replica's expected gap is the median
    of the others at its own lags, weighted with its own tokens (direct standardization). With the median, a second
    faulty replica does not hide the first. `by_replica[replica][lag]`: its tokens of that lag. Returns the replicas
    with `min_tokens` tokens at lags where another has as many.
    """
    found = {}
    for replica, own in by_replica.items():
        tokens, gap, expected = 0, 0.0, 0.0
        for lag, (count, mean) in own.items():
            if (usual := _of_others(by_replica, replica, lag, min_tokens)) is not None:
                tokens, gap, expected = tokens + count, gap + count * mean, expected + count * usual
        if tokens >= min_tokens:
            found[replica] = ReplicaGap(tokens, gap / tokens, expected / tokens)
    return found


def _of_others(by_replica: Mapping[int, Mapping[int, Means]], replica: int, lag: int, min_tokens: int) -> float | None:
    """Return the median over the other replicas with enough tokens of that lag; None if there is none."""
    means = [
        own[lag][1]
        for other, own in by_replica.items()
        if other != replica and lag in own and own[lag][0] >= min_tokens
    ]
    # The lower median: of two others, one may be sick.
    return statistics.median_low(means) if means else None


HYSTERESIS = 0.1  # an alarm ends when the value is better than the threshold by this share of it
RUN = -1  # the subject of rules that are not about a replica


@dataclass(frozen=True)
class AlarmRule:
    """One rule: an alarm where the value is `side` of `threshold` (> 0) in `patience` judged steps in a row."""

    name: str
    side: Side
    threshold: float
    patience: int
    action: str

    def beyond(self, value: float) -> bool:
        """Return whether a value is on the wrong side."""
        return value > self.threshold if self.side == "above" else value < self.threshold

    def recovered(self, value: float) -> bool:
        """Return whether a value is good enough to end an alarm."""
        if self.side == "above":
            return value <= self.threshold * (1.0 - HYSTERESIS)
        return value >= self.threshold * (1.0 + HYSTERESIS)


@dataclass(frozen=True)
class Reading:
    """The value of a rule in one step, of the run or of replica `subject`."""

    rule: str
    value: float
    subject: int = RUN


@dataclass(frozen=True)
class Alarm:
    """An alarm in one step. `begins`: the step before had none. `steps`: steps beyond the threshold in a row."""

    rule: AlarmRule
    value: float
    subject: int
    steps: int
    begins: bool

    @property
    def text(self) -> str:
        """The alarm in words, without its action."""
        of = "" if self.subject == RUN else f" of replica {self.subject}"
        steps = "in this step" if self.steps == 1 else f"for {self.steps} steps"
        return (
            f"alarm {self.rule.name}{of}: {self.value:.4g} is {self.rule.side} {self.rule.threshold:g} {steps} "
            f"(docs/observability/monitor.md#{self.rule.name})"
        )


@dataclass
class _Track:
    steps: int = 0  # judged steps in a row beyond the threshold
    active: bool = False


class Monitor:
    """Judges readings. Keeps state only for subjects beyond a threshold."""

    def __init__(self, rules: Sequence[AlarmRule]) -> None:
        self.rules = {rule.name: rule for rule in rules}
        self._tracks: dict[tuple[str, int], _Track] = {}

    def judge(self, readings: Sequence[Reading]) -> list[Alarm]:
        """Judge the values of one step and return the alarms, in the order of the readings.

        Skips NaN and values of unknown rules. Raises ValueError for a second reading of one rule and subject.
        """
        known = [each for each in readings if each.rule in self.rules and not math.isnan(each.value)]
        places = [(each.rule, each.subject) for each in known]
        if len(set(places)) != len(places):
            raise ValueError(f"several readings for one rule and subject: {sorted(places)}")
        return [alarm for each in known if (alarm := self._judge(each)) is not None]

    def _judge(self, reading: Reading) -> Alarm | None:
        rule, place = self.rules[reading.rule], (reading.rule, reading.subject)
        track = self._tracks.get(place, _Track())
        if not rule.beyond(reading.value):
            track.steps = 0
            if track.active and not rule.recovered(reading.value):
                return None
            self._tracks.pop(place, None)
            return None
        self._tracks[place] = track
        track.steps += 1
        if not track.active and track.steps < rule.patience:
            return None
        begins, track.active = not track.active, True
        return Alarm(rule, reading.value, reading.subject, track.steps, begins)

    @property
    def active(self) -> list[tuple[str, int]]:
        """The rules and subjects in alarm, sorted."""
        return sorted(place for place, track in self._tracks.items() if track.active)

    def forget(self, subject: int) -> None:
        """Forget the state of a replica, because a new engine has its index."""
        self._tracks = {place: track for place, track in self._tracks.items() if place[1] != subject}

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state as JSON content."""
        return [
            {"rule": rule, "subject": subject, "steps": track.steps, "active": track.active}
            for (rule, subject), track in sorted(self._tracks.items())
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Continue from a stored state; the state of removed rules is dropped."""
        self._tracks = {
            (each["rule"], each["subject"]): _Track(each["steps"], each["active"])
            for each in state
            if each["rule"] in self.rules
        }
