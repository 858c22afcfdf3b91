"""A run with a function of one's own that is refused; `test_examples.py` has one that trains."""

from pathlib import Path

import pytest

from tests.support.runs.run import tiny_config, train

pytestmark = pytest.mark.engine


def test_a_function_that_breaks_its_contract_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config["algorithm"] = {"loss": "examples.tutorials.own_loss.topr:above_median"}
    run = train(config)
    assert run.code != 0
    message = "algorithm.loss: the loss examples.tutorials.own_loss.topr:above_median fails on 22 tokens of 5 sequences"
    assert run.output.count(message) == 1, run.output[-4000:]
    assert not (tmp_path / "run").exists()
