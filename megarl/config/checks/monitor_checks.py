"""The checks of the section `monitor`, and the bound on the buckets of tokens that its statistics tell apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config

# The last one contains all larger lags. A larger bound is rare, and such tokens are too old to tell engines apart.
MOST_LAGS = 16


@dataclass(frozen=True)
class SourceBuckets:
    """The buckets of tokens by where they come from: a slot for each replica of a step, times the version lags.

    `slots`: places for replicas, of which the last one is for tokens whose replica has no place or is not known.
    `lags`: version lags 0, 1, ... that are told apart; the last one contains all larger ones.
    """

    slots: int
    lags: int

    @classmethod
    def of(cls, config: Config) -> SourceBuckets:
        """Return the buckets of a run. A step may have tokens of replicas that were replaced meanwhile."""
        replicas = config.rollout.max_replicas or config.rollout.replicas
        return cls(2 * replicas + 1, min(pace_of(config).max_staleness + 1, MOST_LAGS))

    @property
    def size(self) -> int:
        """The number of buckets."""
        return self.slots * self.lags

    def index(self, slot: int, lag: int) -> int:
        """Return the bucket of a slot and a lag."""
        return slot * self.lags + min(max(lag, 0), self.lags - 1)


def monitor_problems(config: Config) -> Iterator[str]:
    """Yield what is wrong with the section `monitor` beside others, with the fix."""
    rules = config.monitor.rules
    for name, rule in rules.items():
        if rule.action == "skip" and config.admission.max_uses > 1:
            yield (
                f"monitor.rules.{name}.action: a step that trains groups again (admission.max_uses="
                f"{config.admission.max_uses}) cannot be skipped, because these groups have ended already; use stop or "
                "warn, or set admission.max_uses=1"
            )
    if rules["entropy"].action not in ("off", "warn") and not config.telemetry.entropy_every:
        yield (
            "monitor.rules.entropy.action: the entropy is never measured with telemetry.entropy_every=0; set it to 1 "
            "or more"
        )
