"""Tiny models, their samples, and runs of a layout with the ranks' results merged."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.models.tensors import merge
from tests.support.trainer.rank_fixtures import OnRanks, model_dir, on_ranks, samples_of

__all__ = ["model_dir", "on_ranks", "samples_of"]


@pytest.fixture(scope="session")
def trained(on_ranks: OnRanks) -> Callable[..., dict[str, Any]]:
    """`trained(ranks, model, layout, **options)`: one run of `ranks.policy.train`, gradients and weights joined.

    The one-rank runs that others are compared with are made once.
    """
    known: dict[str, dict[str, Any]] = {}

    def get(ranks: int, model: str, layout: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        key = repr((ranks, model, layout, sorted(options.items()))) if "samples" not in options else None
        if ranks == 1 and key in known:
            return known[key]
        results = on_ranks(ranks, "training.policy:train", model, layout=layout or {}, **options)
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
