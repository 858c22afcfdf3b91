"""Tiny models of every family, written once; a directory for checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.checkpoint.save.directory import CheckpointDirectory
from tests.support.models.family_models import family_models


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return family_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    """A directory of checkpoints that is empty."""
    return CheckpointDirectory(tmp_path / "checkpoints")
