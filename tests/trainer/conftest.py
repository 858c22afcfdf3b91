"""Tiny models, their samples, and runs of a layout with the ranks' results merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import rl_models, rl_samples
from tests.support.models.tensors import merge


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return rl_models(tmp_path_factory.mktemp("trainer-models"))


@pytest.fixture(scope="session")
def samples_of(model_dir: Callable[[str], Path]) -> Callable[[str], list[TrainSample]]:
    return rl_samples(model_dir)


@pytest.fixture(scope="session")
def trained(
    world: Callable[[int], Any],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
) -> Callable[..., dict[str, Any]]:
    """`trained(ranks, model, layout, **options)`: one run of `ranks.policy.train`, gradients and weights joined.

    The one-rank runs that others are compared with are made once.
    """
    known: dict[str, dict[str, Any]] = {}

    def get(ranks: int, model: str, layout: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        key = repr((ranks, model, layout, sorted(options.items()))) if "samples" not in options else None
        arguments = {"model_dir": model_dir(model), "layout": layout or {}, "samples": samples_of(model), **options}
        if ranks == 1 and key in known:
            return known[key]
        results = world(ranks).run("tests.support.ranks.training.policy:train", timeout=240, **arguments)
        metrics = results[0]["metrics"]
        assert all(result["metrics"] == metrics for result in results), "metrics differ between ranks"
        merged = {
            "gradients": merge([result["gradients"] for result in results]),
            "weights": merge([result["weights"] for result in results]),
            "expert_bias": [result["expert_bias"] for result in results],
            "expert_load": [result["expert_load"] for result in results],
            "metrics": metrics,
            "keys": [result["keys"] for result in results],
        }
        if ranks == 1 and key is not None:
            known[key] = merged
        return merged

    return get
