from pathlib import Path

import pytest

from tests.support.models.tiny import make_tiny_model
from tests.support.models.tiny_vision import make_tiny_vision
from tests.support.trainer.configs import write_problems


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family to the directory of a tiny model with 4 layers; `tied` is Qwen3 with tied embeddings."""
    root = tmp_path_factory.mktemp("config-models")
    found = {
        family: make_tiny_model(root / family, family, num_hidden_layers=4)
        for family in (
            "deepseek_v3",
            "glm4_moe",
            "llama",
            "mixtral",
            "qwen2",
            "qwen3",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_moe",
        )
    }
    found["tied"] = make_tiny_model(root / "tied", "qwen3", num_hidden_layers=4, tie_word_embeddings=True)
    found["mistral"] = make_tiny_model(root / "mistral", "mistral", num_hidden_layers=4, sliding_window=100)
    for family in ("qwen2_5_vl", "qwen3_vl"):
        (root / family).mkdir()
        found[family] = make_tiny_vision(root / family, family)
    return found


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_problems(tmp_path_factory.mktemp("config-data") / "prompts.jsonl", 1)
