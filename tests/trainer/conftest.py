"""Tiny models, their samples, and runs of a layout with the ranks' results merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.trainer.batch import TrainSample
from tests.support.tiny import make_tiny_model
from tests.trainer.problem import dense_dims, make_samples

Tensors = dict[str, torch.Tensor]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "moe": ("qwen3_moe", {}),
    "biased": ("qwen2", {}),
    "llama": ("llama", {}),
    "latent": ("deepseek_v3", {}),
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir("moe")` is a tiny model of MODELS, made once."""
    root = tmp_path_factory.mktemp("trainer-models")
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            family, dims = MODELS[name]
            made[name] = make_tiny_model(root / name, family, **dense_dims(**dims))
        return made[name]

    return get


@pytest.fixture(scope="session")
def samples_of(model_dir: Callable[[str], Path]) -> Callable[[str], list[TrainSample]]:
    made: dict[str, list[TrainSample]] = {}

    def get(name: str) -> list[TrainSample]:
        if name not in made:
            made[name] = make_samples(model_dir(name))
        return made[name]

    return get


@pytest.fixture(scope="session")
def trained(
    world: Callable[[int], Any],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
) -> Callable[..., dict[str, Any]]:
    """`trained(ranks, model, layout, **options)`: one run of `cases.train`, gradients and weights joined.

    The one-rank runs that others are compared with are made once.
    """
    known: dict[str, dict[str, Any]] = {}

    def get(ranks: int, model: str, layout: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        key = repr((ranks, model, layout, sorted(options.items()))) if "samples" not in options else None
        arguments = {"model_dir": model_dir(model), "layout": layout or {}, "samples": samples_of(model), **options}
        if ranks == 1 and key in known:
            return known[key]
        results = world(ranks).run("tests.trainer.cases:train", timeout=240, **arguments)
        metrics = results[0]["metrics"]
        assert all(result["metrics"] == metrics for result in results), "metrics differ between ranks"
        merged = {
            "gradients": merge([result["gradients"] for result in results]),
            "weights": merge([result["weights"] for result in results]),
            "expert_bias": [result["expert_bias"] for result in results],
            "expert_load": [result["expert_load"] for result in results],
            "metrics": metrics,
        }
        if ranks == 1 and key is not None:
            known[key] = merged
        return merged

    return get


def merge(parts: list[Tensors]) -> Tensors:
    """Each tensor from its one owner."""
    merged: Tensors = {}
    for part in parts:
        assert not merged.keys() & part.keys(), "a tensor has two owners"
        merged |= part
    return merged


def worst(got: Tensors, expected: Tensors, scale: Tensors | None = None) -> float:
    """Largest ||got - expected|| / ||scale or expected|| over all tensors."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    scale = scale or expected
    ratios = {}
    for name, value in expected.items():
        size = float(scale[name].norm())
        assert size > 0, f"{name}: nothing to compare with"
        ratios[name] = float((got[name] - value).norm()) / size
    return max(ratios.values())
