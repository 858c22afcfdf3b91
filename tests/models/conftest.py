"""Tiny models of every family, written once, and their log-probs by `transformers`."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models.family_models import Batch, family_models, make_batch


@pytest.fixture(scope="session")
def batch() -> Batch:
    return make_batch()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return family_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def reference(model_dir: Callable[[str], Path], batch: Batch) -> Callable[[str], list[torch.Tensor]]:
    """Log-probs [T, vocab] of each micro-batch, sequence by sequence, by `transformers` in fp32."""

    @cache
    def compute(name: str) -> list[torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(model_dir(name), dtype=torch.float32).eval()
        with torch.no_grad():
            return [torch.cat([model(torch.tensor([s])).logits[0].log_softmax(-1) for s in micro]) for micro in batch]

    return compute
