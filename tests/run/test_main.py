"""What is refused before a run begins."""

from __future__ import annotations

import pytest

from megarl.run.main import _check_launch
from tests.support.configs import config


def test_a_bare_torchrun_does_not_start_several_nodes() -> None:
    chosen = config("model", trainer={"gpus": 2, "gpus_per_node": 1}, rollout={"replicas": 2, "gpus_per_node": 1})
    with pytest.raises(ValueError, match="needs 4 nodes, which a bare torchrun does not start"):
        _check_launch(chosen)
