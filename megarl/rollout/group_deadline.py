"""The deadline of a prompt group: when its responses have to end, and what becomes of those that have not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.common.errors import RolloutError
from megarl.config.schema import RolloutConfig
from megarl.rollout.responses_so_far import ResponsesSoFar


@dataclass(frozen=True)
class GroupDeadline:
    """The time `at` which a group has run for `seconds`, on the caller's monotonic clock."""

    at: float
    seconds: float
    policy: Literal["cut", "fail"]

    @classmethod
    def of(cls, rollout: RolloutConfig, now: float) -> GroupDeadline | None:
        """Return the deadline of a group that starts `now`; None if its responses may take as long as they need."""
        if rollout.group_deadline_s is None or rollout.on_group_deadline == "finish":
            return None
        return cls(now + rollout.group_deadline_s, rollout.group_deadline_s, rollout.on_group_deadline)

    def settle(self, responses: ResponsesSoFar) -> None:
        """Cut the unfinished responses. Raises RolloutError naming them if the policy is to fail."""
        if self.policy == "cut":
            responses.cut()
            return
        names = responses.unfinished
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RolloutError(
            f"{len(names)} of {len(responses)} responses were unfinished at the group's deadline of {self.seconds:g} s "
            f"(rollout.group_deadline_s), with {responses.tokens} tokens: {', '.join(names[:3])}{more}"
        )
