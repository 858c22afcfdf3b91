"""Files of a run that is about to start: a tiny model, and prompts for it."""

import shutil
from pathlib import Path

import pytest

from tests.support.models.tiny import make_tiny_model
from tests.support.trainer.configs import write_problems


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("sound") / "model")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be damaged or to get another template."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_problems(tmp_path / "prompts.jsonl", 4)
