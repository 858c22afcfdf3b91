"""The sockets that gloo opens in each process of a run on CPUs follow from its layout: the libraries' own groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.commands.doctor.unlocked_sockets import megatron_groups, of_engine, of_trainer_rank, sends_weights
from megarl.models.layout import Layout
from megarl.trainer import parallel
from tests.support.configs import config

LAYOUTS: list[dict[str, Any]] = [
    {"world_size": 1},
    {"world_size": 4},
    {"world_size": 4, "tensor": 2, "sequence": True},
    {"world_size": 4, "pipeline": 2, "virtual_pipeline": 2},
    {"world_size": 8, "pipeline": 4},
    {"world_size": 8, "expert": 2, "tensor": 2},
    {"world_size": 8, "expert": 4, "expert_tensor": 1, "tensor": 2},
    {"world_size": 8, "expert": 2, "pipeline": 2},
    {"world_size": 16, "tensor": 2, "pipeline": 4, "expert": 2},
]


@pytest.fixture
def alone() -> Any:
    """This process is in no process group, before and after the test."""
    assert not torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized():
        parallel.destroy()
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_the_groups_of_the_parallel_state_are_those_that_megatron_forms(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, Any]
) -> None:
    """One process forms those of each rank in turn: torch's fake groups need no other rank."""
    monkeypatch.setattr(parallel.tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed: None)
    layout = Layout(**sizes)
    for rank in range(layout.world_size):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
        parallel.initialize(layout, seed=0, timeout_s=60)
        groups = torch.distributed.distributed_c10d._world.pg_map
        formed = sum(each is not torch.distributed.GroupMember.NON_GROUP_MEMBER for each in groups)
        assert megatron_groups(layout, rank) == formed - 1, rank
        # An owner of weights is the first of all ranks that hold the same ones (`megarl/models/export.py`).
        dense = parallel_state.get_data_parallel_rank() == parallel_state.get_tensor_model_parallel_rank() == 0
        first = parallel_state.get_expert_data_parallel_rank() == 0
        expert = layout.expert > 1 and first and parallel_state.get_expert_tensor_parallel_rank() == 0
        assert sends_weights(layout, rank) == (dense or expert), rank
        parallel.destroy()
        torch.distributed.destroy_process_group()


@pytest.mark.world
def test_gloo_opens_one_socket_for_each_group_of_a_process(world: Callable[[int], Any]) -> None:
    """A group of a single rank has one too, and a group of others has none."""
    found = world(2).run("tests.support.ranks.gloo_sockets:counted", groups=[[0, 1], [0], [1], [0, 1]])
    assert found == [[1, 2, 2, 3], [1, 1, 2, 3]]


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        # Measured; of rank 0: the default group, that of Peers, 17 of Megatron-Core, the sync's, and 3 stores.
        ({}, [23, 19]),
        ({"trainer__parallel": {"tensor": 2}}, [23, 19]),
        ({"trainer__parallel": {"pipeline": 2}}, [23, 19]),
        ({"trainer__parallel": {"pipeline": 2}, "admission__mode": "one_step_off"}, [25, 21]),
        ({"admission__mode": "one_step_off"}, [24, 20]),
    ],
)
def test_the_sockets_of_each_rank_of_two(changes: dict[str, Any], numbers: list[int]) -> None:
    own = config("model", trainer__gpus=2, **changes)
    assert [of_trainer_rank(own, rank, has_saved=True) for rank in range(2)] == numbers
    assert of_trainer_rank(own, 0, has_saved=False) == numbers[0] - 1


def test_the_sockets_of_an_engine() -> None:
    assert of_engine(has_experts=False, syncs_weights=True) == 14
    assert of_engine(has_experts=True, syncs_weights=False) == 15
