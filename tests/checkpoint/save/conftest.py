"""Tiny models and samples as the trainer's tests have them, in place of the models of tests/checkpoint/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import rl_models, rl_samples


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return rl_models(tmp_path_factory.mktemp("saved-models"))


@pytest.fixture(scope="session")
def samples_of(model_dir: Callable[[str], Path]) -> Callable[[str], list[TrainSample]]:
    return rl_samples(model_dir)
