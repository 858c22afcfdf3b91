"""The deadline of a prompt group: when its responses and loops have to end, and what becomes of the others. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec

from megarl.config.derived.deadlines import group_deadline_s
from megarl.config.schema import Config
from megarl.rollout.engine.continuation import ResponsesSoFar

GRACE_S = 60.0  # at most, after a group's deadline, when its responses have ended: its loops must have ended then


class GroupDeadline(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The time `at` which a group has run for `seconds`, on the caller's monotonic clock.

    It travels to another process as `sent` returns it, and is `received` there.

    `grace_s`: the seconds after it in which the group's loops have to end.
    """

    at: float
    seconds: float
    policy: Literal["cut", "fail"]
    grace_s: float = GRACE_S

    @classmethod
    def of(cls, config: Config, now: float) -> GroupDeadline | None:
        """Return the deadline of a group that starts `now`; None if it has none of its own.

        Its grace ends before a trainer that has waited for the group from its start gives up.
        """
        seconds, policy = group_deadline_s(config), config.rollout.on_group_deadline
        if seconds is None or policy == "finish":
            return None
        return cls(now + seconds, seconds, policy, min(GRACE_S, (config.timeouts.generate_s - seconds) / 2))

    def sent(self, now: float) -> GroupDeadline:
        """Return it for a process with another clock: `at` is the seconds that are left `now`."""
        return GroupDeadline(max(0.0, self.at - now), self.seconds, self.policy, self.grace_s)

    def received(self, now: float) -> GroupDeadline:
        """Return one that was `sent` on the clock that says `now`."""
        return GroupDeadline(now + self.at, self.seconds, self.policy, self.grace_s)

    def settle(self, responses: ResponsesSoFar) -> None:
        """Cut the unfinished responses. Raises RolloutError naming them if the policy is to fail."""
        if self.policy == "cut":
            responses.cut()
            return
        raise responses.unfinished_at(f"at the group's deadline of {self.seconds:g} s (rollout.group_deadline_s)")
