from __future__ import annotations

import re
from typing import Any, get_origin

import pytest
from pydantic import BaseModel

from megarl.common.errors import ConfigError
from megarl.config.load import config_from_tree, section_of, walk_keys
from megarl.config.removed_keys import REMOVED, advice_on
from megarl.config.schema import Config
from tests.support.checkout import ROOT


def problems_with(key: str, value: object = None) -> list[str]:
    """The problems of a config in which only `key` is set; sections of lists are lists of one."""
    tree: dict[str, Any] = {}
    place, schema = tree, Config
    *parents, leaf = key.split(".")
    for name in parents:
        field = schema.model_fields[name]
        inner: dict[str, Any] = {}
        place[name] = [inner] if get_origin(field.annotation) is list else inner
        place, schema = inner, section_of(field.annotation) or BaseModel
    place[leaf] = value
    with pytest.raises(ConfigError) as caught:
        config_from_tree(tree)
    return caught.value.problems


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_with_what_to_do_instead(key: str) -> None:
    advice = advice_on(key, {})
    assert advice
    told = [re.sub(r"\.0(?=\.)", "", problem) for problem in problems_with(key)]
    assert f"{key}: no longer a key; {advice}" in told


def test_a_removed_key_is_none_and_the_changelog_has_it() -> None:
    assert not REMOVED.keys() & set(walk_keys())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert not [key for key in REMOVED if f"`{key}`" not in changelog]
