"""A weight that a first sync does not bring fails it by name, in place and by a reload, in every family.

The slow cases are families whose weights are of the same kinds as those of a fast one.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.common.errors import WeightSyncError
from megarl.weights.receive.coverage import missing_message
from megarl.weights.receive.loaders import ModelLoader
from tests.support.engines.vllm_model import vllm_model
from tests.support.models.tiny import FAMILIES, make_tiny_model

CPU = torch.device("cpu")


def sync(loader: ModelLoader, tensors: dict[str, torch.Tensor]) -> None:
    loader.check_next_sync()
    loader.start()
    loader.load(list(tensors.items()))
    loader.finish()


def message_without(loader: ModelLoader, model: torch.nn.Module, tensors: dict[str, torch.Tensor], name: str) -> str:
    """Return the error of a sync without this tensor; complete the reload that the error has interrupted."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with pytest.raises(WeightSyncError) as raised:
        sync(loader, {key: tensor for key, tensor in tensors.items() if key != name})
    if loader.obstacle is not None:
        finalize_layerwise_reload(model, loader._model_config)
    return str(raised.value)


def family_case(family: str) -> Any:
    fast = family == "qwen3_moe"
    return pytest.param(family, False, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.engine
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("family", "tied"), [*map(family_case, FAMILIES), ("qwen3", True)])
def test_each_missing_tensor_is_named(tmp_path: Path, family: str, tied: bool, packed: bool) -> None:
    latent = family in ("deepseek_v3", "glm4_moe_lite")
    experts = latent or family in ("glm4_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next")
    sizes: dict[str, Any] = {"moe_intermediate_size": 64} if experts else {"intermediate_size": 64}
    make_tiny_model(tmp_path, family, tie_word_embeddings=tied, **sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    # On a CPU with AMX vLLM would take a kernel that has no such small heads.
    kernel = {"attention_backend": "CPU_MLA"} if latent else {}
    with vllm_model(tmp_path, packed=packed, **kernel) as (model, config):
        loader = ModelLoader(model, config, CPU)
        sync(loader, tensors)
        assert (loader.obstacle is None) == (not packed and not latent), loader.obstacle
        for name in tensors:
            message = message_without(loader, model, tensors, name)
            layer = ".".join(name.split(".")[:3]) if ".layers." in name else name.split(".")[-2]
            assert "brought 1 of" in message and layer in message, (name, message)
        sync(loader, tensors)


@pytest.mark.engine
def test_weights_that_the_engine_has_read_may_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = load_file(make_tiny_model(tmp_path, "qwen3") / "model.safetensors")
    del tensors["model.norm.weight"]
    with vllm_model(tmp_path) as (model, config), caplog.at_level(logging.WARNING):
        loader = ModelLoader(model, config, CPU, read_at_start=True)
        loader.start()
        loader.load(list(tensors.items()))
        loader.finish()
    assert "1 of the engine's weights" in caplog.text and "model.norm.weight" in caplog.text


def test_the_message_names_ten() -> None:
    message = missing_message([f"w{i}" for i in range(12)])
    assert message.endswith("w8, w9 and 2 more") and "12 of the engine's weights" in message
