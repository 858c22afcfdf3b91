"""The time after which a prompt group has to end."""

from __future__ import annotations

from megarl.config.derived.staleness import pace_of
from megarl.config.schema import Config

# Of `timeouts.generate_s`. The rest is for what loops do by themselves, the rewards and the queue: a trainer that has
# waited for the group from its start gives up after `timeouts.generate_s`.
DEFAULT_SHARE = 0.9


def group_deadline_s(config: Config) -> float | None:
    """Return the seconds from a prompt group's start to its deadline; None if it has none.

    By default a group has one where generation runs ahead. A step may there wait for a group that began long before,
    while engines could serve younger ones; a straggler would hold the trainer as long as a response may take at all.
    """
    rollout = config.rollout
    if rollout.on_group_deadline == "finish":
        return None
    if rollout.group_deadline_s is None and pace_of(config).runs_ahead:
        return DEFAULT_SHARE * config.timeouts.generate_s
    return rollout.group_deadline_s
