from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.derived.pools import Pools, resolve_pools
from tests.support.trainer.configs import config


def pools(**changes: Any) -> Pools:
    return resolve_pools(config("model", **changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        pools(**changes)
    return str(caught.value)


def test_one_node_is_split_by_default() -> None:
    found = pools(trainer__gpus=4, rollout={"replicas": 2, "tensor_parallel": 2})
    assert found.shared
    assert found.trainer.devices == (0, 1, 2, 3)
    assert found.rollout.devices == (4, 5, 6, 7)
    assert found.nodes == 1


def test_whole_nodes() -> None:
    found = pools(
        trainer={"gpus": 32, "gpus_per_node": 8},
        rollout={"replicas": 24, "tensor_parallel": 4, "gpus_per_node": 8},
    )
    assert not found.shared
    assert (found.trainer.nodes, found.rollout.nodes, found.nodes) == (4, 12, 16)
    assert found.trainer.devices == found.rollout.devices == tuple(range(8))


def test_listed_devices_push_the_other_pool_away() -> None:
    found = pools(trainer__gpus=2, rollout={"replicas": 2, "devices": [0, 1]})
    assert found.trainer.devices == (2, 3)


def test_several_nodes_each_split() -> None:
    found = pools(
        trainer={"gpus": 8, "devices": [0, 1, 2, 3]},
        rollout={"replicas": 8, "devices": [4, 5, 6, 7]},
    )
    assert found.shared and found.nodes == 2


def test_places_are_kept_for_engines_that_are_added_later() -> None:
    found = pools(
        trainer={"gpus": 4, "gpus_per_node": 4}, rollout={"replicas": 2, "max_replicas": 8, "gpus_per_node": 4}
    )
    assert (found.rollout.gpus, found.rollout.nodes, found.nodes) == (8, 2, 3)
    assert "rollout.max_replicas: 1 is less than rollout.replicas=2" in refusal(
        rollout={"replicas": 2, "max_replicas": 1}
    )


def test_overlap_is_refused_unless_the_nodes_differ() -> None:
    same: dict[str, Any] = {"trainer": {"gpus": 2, "devices": [0, 1]}, "rollout": {"replicas": 2, "devices": [1, 2]}}
    assert "rollout.devices: overlaps trainer.devices in [1]" in refusal(**same)
    same["rollout"]["nodes"] = "separate"
    assert not pools(**same).shared


def test_an_engine_never_spans_nodes() -> None:
    message = refusal(rollout={"replicas": 1, "tensor_parallel": 16, "gpus_per_node": 8})
    assert "rollout.tensor_parallel: 16 GPUs per engine, but the pool has 8 on a node" in message
    assert "not a multiple of rollout.tensor_parallel=4" in refusal(
        rollout={"replicas": 3, "tensor_parallel": 4, "gpus_per_node": 6}
    )


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        (
            {"trainer": {"gpus": 6, "gpus_per_node": 4}},
            "trainer.gpus_per_node: trainer.gpus = 6 is not a multiple of 4",
        ),
        ({"trainer": {"gpus": 2, "devices": [1, 1]}}, "must be distinct"),
        ({"trainer": {"gpus": 2, "devices": []}}, "must be distinct"),
        ({"trainer": {"gpus": 2, "devices": [0, -1]}}, "must be distinct"),
        ({"trainer": {"gpus": 1, "devices": [0, 1]}}, "2 devices for 1 GPUs"),
        ({"trainer": {"gpus": 4, "devices": [0, 1], "gpus_per_node": 4}}, "2 devices but trainer.gpus_per_node=4"),
        ({"trainer": {"gpus": 4, "devices": [0, 1]}}, "the trainer has 2 and the rollout pool 1"),
    ],
)
def test_refusals(changes: dict[str, Any], reported: str) -> None:
    assert reported in refusal(**changes)
