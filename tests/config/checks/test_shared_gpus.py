"""What cannot be where engines share the trainer's GPUs is refused by its name, before anything starts."""

from typing import Any

import pytest

from megarl.common.errors import ConfigError
from megarl.config.checks.engine import shared_gpus_problems
from megarl.config.derived.pools import resolve_pools
from tests.support.trainer.configs import config as config_of

TEACHER = {"name": "t", "path": "t", "where": "engine"}


def problems(device: str = "cpu", **changes: Any) -> list[str]:
    return list(shared_gpus_problems(config_of("model", rollout__share_gpus=True, **changes), device))


def test_sync_and_stream_may_share_their_gpus_and_other_runs_are_not_asked() -> None:
    assert problems() == problems(admission__mode="stream") == []
    assert problems(megatron__transformer={"cuda_graph_impl": "none", "enable_cuda_graph": False}) == []
    assert list(shared_gpus_problems(config_of("model", admission__mode="async"), "cuda")) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"admission__mode": "async"},
            "with admission.mode: async engines generate while the trainer trains; use sync or stream",
        ),
        ({"admission__mode": "one_step_off"}, "with admission.mode: one_step_off engines generate"),
        (
            {"admission": {"mode": "stream", "max_uses": 2}},
            "with admission.max_uses: 2 groups start while the trainer trains; remove admission.max_uses",
        ),
        ({"evaluation__concurrent": True}, "evaluation.concurrent needs engines while the trainer trains"),
        ({"gateway__enabled": True}, "requests of the gateway would wait"),
        ({"rollout__load_weights": True}, "set rollout.load_weights: false"),
        ({"weight_sync__recompute_kv": False}, "set weight_sync.recompute_kv: true"),
        ({"weight_sync__transport": "nccl"}, "NCCL allows only one member per GPU"),
        ({"rollout__max_replicas": 2}, "remove rollout.max_replicas"),
        ({"rollout__devices": [0]}, "remove rollout.devices"),
        ({"rollout__nodes": "separate"}, "remove rollout.devices, rollout.gpus_per_node and rollout.nodes"),
        ({"teachers": [TEACHER]}, "engines of teachers cannot sleep"),
        ({"megatron__ddp": {"nccl_ub": True}}, "megatron.ddp.nccl_ub: NCCL has registered that memory"),
        (
            {"megatron__transformer": {"cuda_graph_impl": "local"}},
            "cuda_graph_impl: a captured graph has the addresses",
        ),
    ],
)
def test_refusals(changes: dict[str, Any], text: str) -> None:
    (found,) = problems(**changes)
    assert text in found and ("rollout.share_gpus" in found)


def test_memory_that_another_process_cannot_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems("cuda") == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    (found,) = problems("cuda")
    assert "PYTORCH_CUDA_ALLOC_CONF has expandable segments" in found
    assert problems("cpu") == []


def test_a_relay_is_for_shared_gpus_only() -> None:
    (found,) = shared_gpus_problems(config_of("model", weight_sync__transport="relay"), "cpu")
    assert "weight_sync.transport: relay is for engines on the trainer's GPUs" in found


def test_engines_are_on_the_gpus_of_the_trainer() -> None:
    shared = {"rollout__share_gpus": True, "trainer__gpus": 8}
    found = resolve_pools(config_of("model", rollout__replicas=4, rollout__tensor_parallel=2, **shared))
    assert found.trainer.devices == found.rollout.devices == tuple(range(8)) and found.shared and found.nodes == 1
    found = resolve_pools(config_of("model", rollout__replicas=2, trainer__devices=[1, 3, 5, 7], **shared))
    assert found.trainer.nodes == found.rollout.nodes == 2 and found.rollout.devices == (1,)
    with pytest.raises(ConfigError, match="cannot be spread evenly over the trainer's 8 on 1 node"):
        resolve_pools(config_of("model", rollout__replicas=9, **shared))
    with pytest.raises(ConfigError, match="cannot be spread evenly over the trainer's 8 on 2 node"):
        resolve_pools(config_of("model", rollout__replicas=3, trainer__gpus_per_node=4, **shared))
