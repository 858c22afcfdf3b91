"""The deadline of a prompt group: when its responses and loops have to end, and what becomes of the others. Pure."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from megarl.config.deadlines import group_deadline_s
from megarl.config.schema import Config
from megarl.rollout.responses_so_far import ResponsesSoFar

# After a group's deadline, when its responses have ended, until its loops must have ended too: at most so many seconds,
# and at most this share of the group's time.
GRACE_S, GRACE_SHARE = 60.0, 0.1
# Of the time from the deadline until a trainer that has waited for the group from its start gives up, what the grace
# may take. Cancelled loops have a part of the rest to end in.
SPARE_SHARE = 0.9
CANCEL_S = 8.0  # less than those wait who cancel a group


class GroupDeadline(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The time `at` which a group has run for `seconds`, on the caller's monotonic clock.

    It travels to another process as `sent` returns it, and is `received` there.

    `spare_s`: the seconds from then until a trainer that has waited for the group from its start gives up.
    """

    at: float
    seconds: float
    policy: Literal["cut", "fail"]
    spare_s: float = math.inf

    @classmethod
    def of(cls, config: Config, now: float) -> GroupDeadline | None:
        """Return the deadline of a group that starts `now`; None if it has none of its own."""
        seconds, policy = group_deadline_s(config), config.rollout.on_group_deadline
        if seconds is None or policy == "finish":
            return None
        return cls(now + seconds, seconds, policy, config.timeouts.generate_s - seconds)

    @property
    def grace_s(self) -> float:
        """The seconds after it that a loop may take by itself (`OwnTime`)."""
        return min(GRACE_S, GRACE_SHARE * self.seconds, SPARE_SHARE * self.spare_s)

    @property
    def cancel_s(self) -> float:
        """The seconds that loops may take to end after they were cancelled, which follow the grace."""
        return min(CANCEL_S, (self.spare_s - self.grace_s) / 2)

    def sent(self, now: float) -> GroupDeadline:
        """Return it for a process with another clock: `at` is the seconds that are left `now`."""
        return GroupDeadline(max(0.0, self.at - now), self.seconds, self.policy)

    def received(self, now: float) -> GroupDeadline:
        """Return one that was `sent` on the clock that says `now`."""
        return GroupDeadline(now + self.at, self.seconds, self.policy)

    def settle(self, responses: ResponsesSoFar) -> None:
        """Cut the unfinished responses. Raises RolloutError naming them if the policy is to fail."""
        if self.policy == "cut":
            responses.cut()
            return
        raise responses.unfinished_at(f"at the group's deadline of {self.seconds:g} s (rollout.group_deadline_s)")


class OwnTime:
    """Measures how long a loop has been left to itself since the time `at`.

    What engines, tools and rewards take is not counted: each has a bound of its own, which may be the longer one.
    """

    def __init__(self, at: float) -> None:
        self._at = self._since = at
        self._before_s = 0.0
        self._services = 0  # that the loop waits for

    def begin_service(self, now: float) -> None:
        """Note that the loop begins to wait for an engine, a tool or a reward; it may wait for several at once."""
        self._before_s = self.seconds(now)
        self._services += 1

    def end_service(self, now: float) -> None:
        """Note the end of one such wait."""
        self._services -= 1
        self._since = max(now, self._at)

    def seconds(self, now: float) -> float:
        """Return the loop's own time until `now`."""
        return self._before_s if self._services else self._before_s + max(0.0, now - self._since)
