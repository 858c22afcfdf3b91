"""Fixtures of tests that train tiny models on ranks: the models, their samples, and calls on the ranks of a world."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import rl_models, rl_samples
from tests.support.worlds.world import World

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return rl_models(tmp_path_factory.mktemp("trained-models"))


@pytest.fixture(scope="session")
def samples_of(model_dir: Callable[[str], Path]) -> Callable[[str], list[TrainSample]]:
    return rl_samples(model_dir)


@pytest.fixture(scope="session")
def on_ranks(
    world: Callable[[int], World],
    model_dir: Callable[[str], Path],
    samples_of: Callable[[str], list[TrainSample]],
) -> OnRanks:
    """`on_ranks(2, "training.policy:train", "moe")`: what that function of `tests.support.ranks` returns on each rank.

    It is called with the directory of the model and its samples; keywords replace these or are further arguments.
    """

    def call(ranks: int, function: str, model: str = "dense", **arguments: Any) -> list[Any]:
        given = {"model_dir": model_dir(model), "samples": samples_of(model)}
        return world(ranks).run(f"tests.support.ranks.{function}", timeout=240, **given | arguments)

    return call
