"""vLLM's entry point: registers once, and ties only vLLM's own children to their parent."""

import multiprocessing
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from megarl.common.process import held_outputs
from megarl.weights.receive import vllm_plugin
from megarl.weights.receive.engine_guard import EngineUnpickler


def test_the_entry_point_is_installed() -> None:
    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "megarl"]
    assert point.load() is vllm_plugin.register


def test_registering_twice_is_harmless_and_gives_our_engine() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    vllm_plugin.register()
    vllm_plugin.register()
    engine = WeightTransferEngineFactory._registry[vllm_plugin.BACKEND]()
    assert engine.__name__ == "MegarlWeightTransferEngine"


def test_latent_queries_are_rotated_by_their_positions() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(8, 8, 64, 1e4, False, torch.float32)
    positions = torch.tensor([0, 5, 1, 40])
    query, key = torch.rand(4, 3, 8), torch.rand(4, 1, 8)
    expected = rope.forward_native(positions, query.clone(), key.clone())
    vllm_plugin.register()
    for ours, right in zip(rope.forward_cpu(positions, query.clone(), key.clone()), expected, strict=True):
        assert ours is not None and right is not None and torch.allclose(ours, right)


@pytest.mark.parametrize("sees", [True, False])
def test_what_is_lost_in_a_sleep_and_not_restored_is_zero(sees: bool) -> None:
    added, positions = [torch.full((4, 2), torch.nan) for _ in range(3)], torch.full((3, 5), 2**40)
    model = SimpleNamespace(**({"deepstack_input_embeds": added} if sees else {}))
    state = SimpleNamespace(rope_state=SimpleNamespace(positions=positions) if sees else None)
    worker = vllm_plugin.GpuMemory()
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model_state=state)
    worker.zero_lost()
    assert all(bool((each == 0).all()) is sees for each in [*added, positions])


@pytest.mark.parametrize(
    ("name", "has_parent", "armed"),
    [
        ("EngineCore", True, True),
        ("EngineCore_DP1", True, True),
        ("VllmWorker-0", True, True),
        ("SpawnProcess-1", True, False),
        ("MainProcess", False, False),
        ("EngineCore", False, False),
    ],
)
def test_only_vllm_children_die_with_their_parent_and_are_guarded(
    monkeypatch: pytest.MonkeyPatch, name: str, has_parent: bool, armed: bool
) -> None:
    calls: list[bool] = []
    guarded: list[type] = []
    monkeypatch.setattr("megarl.common.process.processes.die_with_parent", lambda: calls.append(True))
    monkeypatch.setattr("megarl.common.trust.object_guard.guard_object_collectives", guarded.append)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object() if has_parent else None)
    vllm_plugin.register()
    assert calls == [True] * armed and guarded == [EngineUnpickler] * armed


@pytest.mark.parametrize(
    ("name", "hold_s", "held"),
    [
        ("EngineCore", "0.5", [0.5]),
        ("EngineCore_DP1", "0.5", [0.5]),
        ("EngineCore", None, []),
        ("VllmWorker-0", "1", []),
    ],
)
def test_only_engine_processes_of_megarls_front_ends_hold_their_outputs(
    monkeypatch: pytest.MonkeyPatch, name: str, hold_s: str | None, held: list[float]
) -> None:
    calls: list[float] = []
    monkeypatch.setattr("megarl.common.process.processes.die_with_parent", lambda: None)
    monkeypatch.setattr("megarl.common.trust.object_guard.guard_object_collectives", lambda _: None)
    monkeypatch.setattr(held_outputs, "hold_outputs", calls.append)
    monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.delenv(held_outputs.VARIABLE, raising=False)
    if hold_s is not None:
        monkeypatch.setenv(held_outputs.VARIABLE, hold_s)
    vllm_plugin.register()
    assert calls == held
