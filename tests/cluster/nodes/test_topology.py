"""The assignment of the job's parts to nodes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cluster.nodes.topology import Topology, make_topology, stop_seconds
from megarl.common.errors import ConfigError
from megarl.config.schema.job import LaunchConfig, TimeoutsConfig
from tests.support.trainer.configs import config


def topology(**changes: Any) -> Topology:
    return make_topology(config("model", **changes))


def test_whole_nodes() -> None:
    found = topology(
        trainer={"gpus": 32, "gpus_per_node": 8},
        rollout={"replicas": 24, "tensor_parallel": 4, "gpus_per_node": 8},
    )
    assert [node.role for node in found.nodes] == ["trainer"] * 4 + ["rollout + supervisor"] + ["rollout"] * 11
    assert [node.trainer_rank for node in found.nodes] == [0, 1, 2, 3] + [None] * 12
    assert {node.engines for node in found.nodes[4:]} == {2} and found.nodes[0].engines == 0
    assert (found.trainer_nodes, found.ranks_per_node, found.node_gpus) == (4, 8, 8)


def test_a_split_inside_one_node() -> None:
    found = topology(trainer={"gpus": 4}, rollout={"replicas": 4})
    (node,) = found.nodes
    assert node.role == "trainer + rollout + supervisor"
    assert (node.trainer_devices, node.rollout_devices) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.node_gpus == 8


def test_shared_gpus_have_both_parts_on_every_node() -> None:
    found = topology(
        trainer={"gpus": 16, "gpus_per_node": 8}, rollout={"share_gpus": True, "replicas": 8, "tensor_parallel": 2}
    )
    assert [node.role for node in found.nodes] == ["trainer + rollout + supervisor", "trainer + rollout"]
    for rank, node in enumerate(found.nodes):
        assert node.trainer_devices == node.rollout_devices == tuple(range(8))
        assert (node.trainer_rank, node.engines) == (rank, 4)
    assert found.node_gpus == 8


def test_a_gap_in_the_devices_still_needs_the_whole_node() -> None:
    found = topology(trainer={"gpus": 1, "devices": [0]}, rollout={"replicas": 1, "devices": [7]})
    assert found.node_gpus == 8 and (found.nodes[0].trainer_devices, found.nodes[0].rollout_devices) == ((0,), (7,))


@settings(deadline=None)
@given(
    trainer=st.integers(1, 32),
    per_node=st.sampled_from([None, 1, 2, 4, 8]),
    replicas=st.integers(1, 16),
    tensor=st.sampled_from([1, 2, 4]),
    rollout_per_node=st.sampled_from([None, 1, 4, 8]),
    nodes=st.sampled_from(["auto", "shared", "separate"]),
)
def test_every_rank_and_engine_has_exactly_one_place(
    trainer: int, per_node: int | None, replicas: int, tensor: int, rollout_per_node: int | None, nodes: str
) -> None:
    try:
        found = topology(
            trainer={"gpus": trainer, "gpus_per_node": per_node},
            rollout={
                "replicas": replicas, "tensor_parallel": tensor, "gpus_per_node": rollout_per_node, "nodes": nodes,
            },
        )  # fmt: skip
    except ConfigError:
        return
    assert [node.index for node in found.nodes] == list(range(len(found.nodes)))
    assert sum(len(node.trainer_devices) for node in found.nodes) == trainer
    assert sum(node.engines for node in found.nodes) == replicas
    ranks = [node.trainer_rank for node in found.nodes if node.trainer_rank is not None]
    assert ranks == list(range(found.trainer_nodes)) and found.trainer_nodes * found.ranks_per_node == trainer
    (supervisor,) = (node for node in found.nodes if node.supervisor)
    assert supervisor.engines
    for node in found.nodes:
        assert not set(node.trainer_devices) & set(node.rollout_devices)
        assert node.engines * tensor == len(node.rollout_devices) and node.last_device < found.node_gpus


def test_the_time_for_stopping_follows_from_the_saves_bound() -> None:
    assert stop_seconds(LaunchConfig(), TimeoutsConfig(save_s=100)) == 400
    assert stop_seconds(LaunchConfig(stop_before_s=50), TimeoutsConfig()) == 50


def test_a_save_that_cannot_end_in_time_is_refused() -> None:
    from megarl.config.checks.sections import launch_problems

    made = config("model", launch={"stop_before_s": 50}, timeouts={"save_s": 60})
    (problem,) = launch_problems(made.launch, made.timeouts)
    assert problem.startswith("launch.stop_before_s: 50 s") and "60" in problem


@pytest.mark.parametrize("limit", ["10", "1:2", "one day", "10:00"])
def test_a_time_limit_has_slurms_form(limit: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.time_limit"):
        config("model", launch={"time_limit": limit})
