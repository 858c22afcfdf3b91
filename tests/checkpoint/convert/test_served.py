"""vLLM serves what the converter exports, family by family, with the log-probs that `transformers` finds."""

from pathlib import Path

import pytest

from megarl.models.families import FAMILIES
from tests.support.checkpoints.converter import convert
from tests.support.engines.live_engine import LiveReplica, Response, reference
from tests.support.models.tiny import LATENT, make_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [9, 3, 7, 5, 4, 8, 6]


def exported(source: Path, directory: Path) -> Path:
    """Import a model into a Megatron checkpoint and export that; return the exported model's directory."""
    convert("import", "--hf", source, "--out", directory / "megatron")
    convert("export", "--megatron", directory / "megatron", "--hf", directory / "hf")
    return directory / "hf"


def served(model: Path) -> Response:
    replica = LiveReplica(model)
    try:
        response: Response = replica.generate(PROMPT, "one", max_tokens=32, seed=1).result(120)
    finally:
        replica.shutdown()
    assert len(response.ids) == 32
    return response


SIZES: dict[str, dict[str, object]] = {
    "deepseek_v3": LATENT,
    "glm4_moe": {"moe_intermediate_size": 64},
    "glm4_moe_lite": LATENT | {"qk_nope_head_dim": 192, "v_head_dim": 256},
    "qwen3_5_moe": {"moe_intermediate_size": 64},
    "qwen3_next": {"moe_intermediate_size": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_serves_the_export(family: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", family, **SIZES.get(family, {}))
    response = served(exported(source, tmp_path))
    _, expected = reference(source, PROMPT, response.ids)
    assert all(abs(a - b) <= 1e-4 for a, b in zip(response.logprobs, expected.tolist(), strict=True))
