"""vLLM serves what the converter exports, family by family, with the log-probs that `transformers` finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.converter import convert
from tests.support.tiny import make_tiny_model
from tests.weights.live import LiveReplica, reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT = [9, 3, 7, 5, 4, 8, 6]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_vllm_serves_the_export(family: str, tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", family)
    convert("import", "--hf", source, "--out", tmp_path / "megatron")
    convert("export", "--megatron", tmp_path / "megatron", "--hf", tmp_path / "hf")
    replica = LiveReplica(tmp_path / "hf")
    try:
        response = replica.generate(PROMPT, "one", max_tokens=32, seed=1).result(120)
    finally:
        replica.shutdown()
    _, expected = reference(source, PROMPT, response.ids)
    assert len(response.ids) == len(expected) == 32
    assert max(abs(a - b) for a, b in zip(response.logprobs, expected.tolist(), strict=True)) <= 1e-4
