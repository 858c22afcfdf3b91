"""The rows that an agent loop has made of one sample, checked and numbered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.trajectory_builder import check_trajectory

# A sample has one reward and one end, whatever the number of its rows.
_SHARED = ("reward", "reward_components", "status", "failure", "reward_error")


def sample_rows(made: Trajectory | Sequence[Trajectory], group_id: int, sample_index: int) -> list[Trajectory]:
    """Return what an agent loop has returned as the parts 0, 1, ... of the sample, in its order.

    Raises ValueError naming the sample and what is wrong with it: a row (`check_trajectory`), rows that differ in
    reward, in status or in whether they have rewards of turns, or one of several rows without a token that the model
    sampled.
    """
    rows = [made] if isinstance(made, Trajectory) else list(made)
    name = f"sample {group_id}:{sample_index}"
    if not rows:
        raise ValueError(f"{name}: the agent loop returned no trajectory; return a failed one if there is nothing")
    for number, row in enumerate(rows):
        check_trajectory(row, group_id, sample_index)
        for shared in _SHARED:
            if getattr(row, shared) != getattr(rows[0], shared):
                raise ValueError(
                    f"{name}: its trajectories 0 and {number} differ in {shared}; all trajectories of a sample have "
                    "the sample's reward and status"
                )
        if bool(row.turn_rewards) != bool(rows[0].turn_rewards):
            raise ValueError(f"{name}: of its trajectories 0 and {number} only one has turn_rewards")
        if len(rows) > 1 and row.status == "ok" and not any(row.response_mask):
            raise ValueError(f"{name}: its trajectory {number} of {len(rows)} has no token that the model sampled")
    return rows if len(rows) == 1 and not rows[0].part else [replace(row, part=n) for n, row in enumerate(rows)]
