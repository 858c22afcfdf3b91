"""The problems of a config, as the checks before a start tell them."""

import pytest

from megarl.common.errors import ConfigError
from megarl.config.schema import Config
from megarl.models.hf.read_config import load_info
from megarl.run.start.checks import check_start


def problems_of(chosen: Config) -> list[str]:
    """Return the problems of a config that must have some."""
    with pytest.raises(ConfigError) as raised:
        check_start(chosen, load_info(chosen.model.path))
    return raised.value.problems
