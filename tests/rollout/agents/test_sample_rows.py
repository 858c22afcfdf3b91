"""The trajectories that an agent loop returns become the numbered parts of its sample, with one reward and one end."""

from dataclasses import replace
from typing import Any

import pytest

from megarl.queue.trajectory import Trajectory, VersionSpan
from megarl.rollout.agents.trajectory_builder import sample_rows

ROW = Trajectory(4, 1, [1, 2], [3, 4], [-0.5, -0.25], (VersionSpan(7, 0, 2),), "stop", 1.0, {"correct": 1.0})


def test_one_trajectory_is_the_whole_sample() -> None:
    assert sample_rows(ROW, 4, 1) == [ROW] == sample_rows([ROW], 4, 1)


def test_several_trajectories_are_numbered_and_have_keys_of_their_own() -> None:
    shorter = replace(
        ROW, response_ids=[3], rollout_logprobs=[-0.5], response_mask=[1], versions=(VersionSpan(7, 0, 1),)
    )
    rows = sample_rows((ROW, shorter, ROW), 4, 1)
    assert [row.key for row in rows] == ["4:1", "4:1.1", "4:1.2"] == [row.tag.key for row in rows]
    assert [replace(row, part=0) for row in rows] == [ROW, shorter, ROW]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": 0.5}, "trajectories 0 and 1 differ in reward;"),
        ({"reward_components": {}}, "trajectories 0 and 1 differ in reward_components;"),
        ({"status": "failed", "failure": "cut"}, "trajectories 0 and 1 differ in status;"),
        ({"response_mask": [0, 0]}, "its trajectory 1 of 2 has no token that the model sampled"),
        ({"sample_index": 0}, "the agent loop of sample 4:1 returned a trajectory of 4:0"),
        ({"turn_rewards": [1.0], "turn_starts": [0]}, "trajectories 0 and 1 only one has turn_rewards"),
        ({"versions": ()}, "no weight version for response token 0"),
    ],
)
def test_trajectories_that_cannot_be_one_sample_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_rows([ROW, replace(ROW, **changes)], 4, 1)


def test_a_loop_that_returns_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="sample 4:1: the agent loop returned no trajectory"):
        sample_rows([], 4, 1)
