"""Tiny models and samples as the trainer's tests have them, and the checkpoints of runs with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainer.rank_fixtures import OnRanks, model_dir, on_ranks, samples_of

__all__ = ["model_dir", "on_ranks", "samples_of"]


@pytest.fixture(scope="session")
def saved(on_ranks: OnRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[Any]]]:
    """`saved(function, ranks, model, layout)`: the checkpoints' directory and each rank's results, made once."""
    known: dict[str, tuple[Path, list[Any]]] = {}

    def get(function: str, ranks: int, model: str, layout: dict[str, Any], **changes: Any) -> tuple[Path, list[Any]]:
        key = repr((function, ranks, model, layout, sorted(changes.items())))
        if key not in known:
            root = tmp_path_factory.mktemp("checkpoints")
            known[key] = root, on_ranks(ranks, function, model, layout=layout, root=root, **changes)
        return known[key]

    return get
