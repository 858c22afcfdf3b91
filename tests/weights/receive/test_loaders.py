"""The two ways to load a model give the same bits and the same memory, in fp32 and bf16; a reload is the fallback."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.common.errors import WeightSyncError
from megarl.weights.receive import loaders
from megarl.weights.receive.loaders import ModelLoader
from tests.support.engines.engine_worker import bits
from tests.support.engines.vllm_model import vllm_model
from tests.support.models.tiny import make_tiny_model

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


@pytest.mark.parametrize("tied", [True, False])
def test_a_reload_makes_no_second_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """It is the largest tensor, and overwritten in place; kernels that keep a packed copy of it get a new one."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import layerwise

    made: list[torch.nn.Module] = []
    original = layerwise.materialize_layer

    def materialize(layer: torch.nn.Module, *rest: object) -> None:
        original(layer, *rest)
        made.append(layer)

    monkeypatch.setattr(layerwise, "materialize_layer", materialize)
    make_tiny_model(tmp_path, "qwen3", seed=1, tie_word_embeddings=tied)
    tensors = load_file(tmp_path / "model.safetensors")
    with vllm_model(tmp_path, packed=True) as (model, config):
        place = model.model.embed_tokens.weight.data_ptr()
        loader = ModelLoader(model, config, CPU)
        for _ in range(2):
            tensors = {name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}
            made.clear()
            load(loader, tensors)
            assert made and not any(isinstance(layer, VocabParallelEmbedding) for layer in made)
            embedding = tensors["model.embed_tokens.weight"]
            weight = model.model.embed_tokens.weight
            assert weight.data_ptr() == place and torch.equal(weight[: len(embedding)], embedding)
            head = embedding if tied else tensors["lm_head.weight"]
            input_NI = torch.linspace(-1, 1, 3 * head.shape[1]).view(3, -1)
            given = model.lm_head.quant_method.apply(model.lm_head, input_NI)[:, : len(head)]
            torch.testing.assert_close(given, input_NI @ head.T)


def outputs(model: torch.nn.Module) -> list[bytes]:
    """The output of each linear layer, packed or not, for the same input. Shapes: N rows, I input features."""
    from vllm.model_executor.layers.linear import LinearBase

    found = []
    for module in model.modules():
        if isinstance(module, LinearBase):
            input_NI = torch.linspace(-1, 1, 3 * module.input_size).view(3, -1)
            found.append(bits(module.quant_method.apply(module, input_NI)))
    return found


@pytest.mark.parametrize("way", ["layer-wise reload", "packed", "in place"])
def test_a_sync_that_is_given_up_anywhere_leaves_nothing_behind_but_old_and_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The next one gives the bits of a fresh load, in the same memory. Fused modules are cut at every place."""
    make_tiny_model(tmp_path, "qwen3_moe", moe_intermediate_size=64, mlp_only_layers=[0], attention_bias=True)
    first = load_file(tmp_path / "model.safetensors")
    second = {name: tensor.flip(0).contiguous() for name, tensor in first.items()}
    with vllm_model(tmp_path, packed=way == "packed") as (model, config):
        loader = ModelLoader(model, config, CPU)
        if way == "layer-wise reload":
            monkeypatch.setattr(loaders, "in_place_obstacle", lambda *_: "a test asks for it")

        def state() -> tuple[dict[str, bytes], list[bytes]]:
            return {name: bits(tensor) for name, tensor in model.named_parameters()}, outputs(model)

        expected = []
        for tensors in (first, second):
            load(loader, tensors)
            expected.append(state())
        tensors = {id(parameter): parameter.data_ptr() for parameter in model.parameters()}
        assert expected[0] != expected[1] and (way == "in place") == loader.way.startswith("in place")
        names, mixtures = list(first), 0
        for cut in range(0, len(names) + 1, 5):
            loader.start()
            loader.load([(name, first[name]) for name in names[:cut]])
            loader.abandon()
            assert {id(parameter): parameter.data_ptr() for parameter in model.parameters()} == tensors
            mixtures += state() not in expected
            load(loader, second)
            assert state() == expected[1], f"after {cut} of {len(names)} tensors"
        assert mixtures > 5, "no sync was given up in the middle"
        load(loader, first)
        assert state() == expected[0]


def test_after_a_sync_that_was_given_up_the_next_one_must_bring_every_weight(tmp_path: Path) -> None:
    """Otherwise what it omits would stay of the version that was given up."""
    make_tiny_model(tmp_path, "qwen3")
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    with vllm_model(tmp_path) as (model, config):
        loader = ModelLoader(model, config, CPU)
        load(loader, dict(tensors))
        loader.start()
        loader.load(tensors[:7])
        loader.abandon()
        loader.start()
        loader.load(tensors[1:])
        with pytest.raises(WeightSyncError, match="brought 1 of the engine's weights"):
            loader.finish()


def test_a_reload_that_cannot_be_undone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later vLLM may put other tensors into a module than those that were set aside."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    make_tiny_model(tmp_path, "qwen3")
    tensors = list(load_file(tmp_path / "model.safetensors").items())
    with vllm_model(tmp_path, packed=True) as (model, config):
        loader = ModelLoader(model, config, CPU)
        loader.start()
        loader.load(tensors[:7])
        monkeypatch.setattr(loaders, "put_back", lambda module: get_layerwise_info(module).reset())
        with pytest.raises(WeightSyncError, match=r"left tensors or modules that the engine cannot use"):
            loader.abandon()
