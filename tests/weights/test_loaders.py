"""The two ways to load a model give the same bits and the same memory, in fp32 and bf16; a reload is the fallback."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.weights import loaders
from megarl.weights.loaders import ModelLoader
from tests.support.engine_worker import bits
from tests.support.tiny import make_tiny_model
from tests.support.vllm_model import vllm_model

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")


def load(loader: ModelLoader, tensors: dict[str, torch.Tensor]) -> None:
    """Load in two parts, as from two buckets; the second part begins in the middle of a fused module."""
    named = list(tensors.items())
    cut = [name for name, _ in named].index("model.layers.1.self_attn.k_proj.weight")
    loader.start()
    loader.load(named[:cut])
    loader.load(named[cut:])
    loader.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    make_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=64, mlp_only_layers=[0])
    first = {name: t.to(dtype) for name, t in load_file(tmp_path / "model.safetensors").items()}
    second = {name: tensor.flip(0).contiguous() for name, tensor in first.items()}
    with vllm_model(tmp_path, dtype=str(dtype).removeprefix("torch.")) as (model, config):
        loader = ModelLoader(model, config, CPU)
        found: dict[str, list[dict[str, bytes]]] = {}
        places = [parameter.data_ptr() for parameter in model.parameters()]
        for obstacle in ("a test asks for it", None):
            with monkeypatch.context() as patch:
                if obstacle is not None:
                    patch.setattr(loaders, "in_place_obstacle", lambda *_, reason=obstacle: reason)
                for tensors in (first, second, first, second):
                    load(loader, tensors)
                    live = {name: bits(parameter) for name, parameter in model.named_parameters()}
                    found.setdefault(loader.way, []).append(live)
        reload, record, repeat = found
        assert reload == "layer-wise reload: a test asks for it"
        assert (record, repeat) == ("in place, recording copies", "in place by recorded copies")
        (old, new, *again) = found[reload]
        assert again == [old, new] and all(old[name] != new[name] for name in old)
        assert found[record] == [old] and found[repeat] == [new, old, new]
        assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_a_packed_model_is_reloaded(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3", seed=1)
    with vllm_model(tmp_path, packed=True) as (model, config):
        loader = ModelLoader(model, config, CPU)
        assert "packed copy" in str(loader.check())
        load(loader, load_file(tmp_path / "model.safetensors"))
        assert loader.way.startswith("layer-wise reload: model.embed_tokens")
