"""The trainer loads quantised files under every kind of layout as the model that they stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models.family_models import VOCAB, Batch
from tests.support.models.quantized import quantized_model
from tests.support.worlds.world import World

pytestmark = pytest.mark.world


@pytest.mark.parametrize(
    ("family", "form", "layout"),
    [
        ("deepseek_v3", "fp8", {"tensor": 2, "sequence": True}),  # cuts latent attention and experts inside of blocks
        ("qwen3_moe", "fp8", {"pipeline": 2}),
        ("deepseek_v3", "int4", {"expert": 2}),
        ("qwen3_moe", "int4", {"tensor": 2, "sequence": True}),
    ],
)
def test_logprobs_equal_transformers(
    family: str, form: str, layout: dict[str, Any], world: Callable[[int], World], batch: Batch, tmp_path: Path
) -> None:
    quantised, plain = quantized_model(tmp_path, family, form, vocab_size=VOCAB)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = [torch.cat([model(torch.tensor([s])).logits[0].log_softmax(-1) for s in micro]) for micro in batch]
    results = world(2).run(
        "tests.support.ranks.models.models:logprobs", model_dir=str(quantised), batch=batch, **layout
    )
    answers = [result for result in results if result is not None]
    assert len(answers) == 2 // layout.get("pipeline", 1)
    for answer in answers:
        assert max(float((ours - theirs).abs().max()) for ours, theirs in zip(answer, wanted, strict=True)) <= 1e-5
