"""Files that other processes read while they are written again."""

import json
import math
from pathlib import Path

import pytest

from megarl.common.files import write_json


def test_json_is_replaced_whole_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": [math.nan, {"b": math.inf}], "c": (1, 2)})
    assert json.loads(path.read_text()) == {"a": [None, {"b": None}], "c": [1, 2]}
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text())["c"] == [1, 2]
