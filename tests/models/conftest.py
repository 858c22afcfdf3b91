"""Tiny models of every family, written once, and their log-probs by `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl import platforms
from tests.support.tiny import make_tiny_model

# `transformers` must give the same answers with the CPU emulation active as without.
platforms.activate()

Batch = list[list[list[int]]]
VOCAB = 101  # prime: padded under every TP

SHAPES: dict[str, dict[str, object]] = {
    # Texts of `BATCH` go beyond 24 positions, so the scaling of all three wavelength bands is seen.
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 24,
        }
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"rope_theta": 5e5},
    "qwen3_moe": {"mlp_only_layers": [1]},
}
# Single tokens, equal neighbours, one long text alone, totals that TP must pad.
LENGTHS = [(5, 5, 17, 60), (45,), (7, 1, 9), (3, 3, 4)]


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in lengths] for lengths in LENGTHS]


@pytest.fixture(scope="session")
def batch() -> Batch:
    return make_batch()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str) -> Path:
        shape = {"num_hidden_layers": 4, "vocab_size": VOCAB, **SHAPES[family]}
        if "rope_parameters" in shape:
            shape["rope_theta"] = None
        return make_tiny_model(root / family, family, **shape)

    return make


@pytest.fixture(scope="session")
def reference(model_dir: Callable[[str], Path], batch: Batch) -> Callable[[str], list[torch.Tensor]]:
    """Log-probs [T, vocab] of each micro-batch, sequence by sequence, by `transformers` in fp32."""

    @cache
    def compute(family: str) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(model_dir(family), dtype=torch.float32).eval()
        with torch.no_grad():
            return [torch.cat([model(torch.tensor([s])).logits[0].log_softmax(-1) for s in micro]) for micro in batch]

    return compute
