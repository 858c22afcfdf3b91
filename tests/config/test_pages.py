"""Each YAML block of the pages is part of a config that is accepted."""

import re
from typing import Any

import pytest
import yaml

from megarl.config.loading.load import config_from_tree
from megarl.config.schema import Config
from tests.support.checkout import ROOT
from tests.support.trainer.configs import tree

OTHERS = {"scrape_configs"}  # Prometheus'
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(ROOT.glob("docs/**/*.md"))
    for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_it_is_accepted(block: str) -> None:
    content: dict[str, Any] = yaml.safe_load(block)
    if content.keys() <= OTHERS:
        return
    assert content.keys() <= Config.model_fields.keys()
    config_from_tree({**tree("model"), **content})
