"""Assets of the quickstart, which several whole runs use."""

import pytest

from tests.support.models.assets import Assets, make_assets


@pytest.fixture(scope="session")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    """The quickstart's data and warm-started checkpoint, made once."""
    return make_assets(tmp_path_factory.mktemp("quickstart") / "assets")
