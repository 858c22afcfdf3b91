"""A whole run with the loss and the advantage of examples/rl/algorithms, and one that is refused before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.leftovers import assert_nothing_left
from tests.support.run import tiny_config, train

pytestmark = pytest.mark.engine


def test_a_run_with_a_loss_and_an_advantage_of_ones_own(tmp_path: Path) -> None:
    """Two updates per step, so that the second one's ratios differ from 1 and its weights are bounded."""
    config = tiny_config(tmp_path, steps=2)
    config["trainer"]["mini_batches"] = 2
    config["algorithm"] = {
        "loss": "examples.tutorials.own_loss.topr:topr",
        "loss_options": {"cap": 1.0},
        "advantage": "examples.tutorials.own_loss.topr:above_median",
        "ce": {"tokens": "sampled", "coef": 0.01},
    }
    run = train(config)
    assert run.code == 0, run.output[-4000:]
    assert run.summary["exit"] == "finished" and len(run.metrics) == 2
    for record in run.metrics:
        assert record["policy/updates"] == 2 and record["policy/clip_high"] > 0
        assert record["policy/ce_tokens"] == record["policy/tokens"] == record["batch/loss_tokens"]
        assert record["policy/ce"] > 0
    assert_nothing_left(run.directory)


def test_a_function_that_breaks_its_contract_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    config["algorithm"] = {"loss": "examples.tutorials.own_loss.topr:above_median"}
    run = train(config)
    assert run.code != 0
    told = "algorithm.loss: the loss examples.tutorials.own_loss.topr:above_median fails on 22 tokens of 5 sequences"
    assert run.output.count(told) == 1, run.output[-4000:]
    assert not (tmp_path / "run").exists()
