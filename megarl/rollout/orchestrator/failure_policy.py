"""The rule that decides whether a failed prompt group ends the run or is counted. Pure."""

from __future__ import annotations

from typing import Literal

from megarl.common.errors import NoReplicaLeft, NoWorkerLeft, RolloutError, clear_text
from megarl.rewards.worker_pool import RewardPoolError

OnGroupFailure = Literal["count", "stop"]


class FailurePolicy:
    """Decides for each failed group; the controller reports every failure and every success to it.

    A failure ends the run if the policy is `stop`, if no replica, agent worker or reward process is left, or if `limit`
    groups in a row have failed, because then the cause is not in one group.
    """

    def __init__(self, on_group_failure: OnGroupFailure, limit: int) -> None:
        """`on_group_failure`: `rollout.on_group_failure` of the config. A `limit` below 2 counts as 2."""
        self._on_group_failure, self._limit = on_group_failure, max(2, limit)
        self._in_a_row = 0

    def succeeded(self) -> None:
        """Record that a group has been sampled and scored."""
        self._in_a_row = 0

    def decide(self, group_id: int, error: Exception) -> RolloutError | None:
        """Return the error that ends the run; None if the group is to be counted as failed."""
        self._in_a_row += 1
        if isinstance(error, NoReplicaLeft | NoWorkerLeft | RewardPoolError) or self._on_group_failure == "stop":
            return error if isinstance(error, RolloutError) else RolloutError(f"rollout failed: {clear_text(error)}")
        if self._in_a_row >= self._limit:
            return RolloutError(
                f"{self._in_a_row} prompt groups in a row failed in rollout; the last, group {group_id}: "
                f"{clear_text(error)}"
            )
        return None
