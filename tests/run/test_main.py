"""The mistakes that are refused before a run begins, and the config that its parts get."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from megarl.config.fit import with_trainer
from megarl.config.load import load_config
from megarl.config.plan import make_plan
from megarl.run import main
from tests.support.configs import config


def test_a_bare_torchrun_does_not_start_several_nodes() -> None:
    chosen = config("model", trainer={"gpus": 2, "gpus_per_node": 1}, rollout={"replicas": 2, "gpus_per_node": 1})
    with pytest.raises(ValueError, match="needs 4 nodes, which a bare torchrun does not start"):
        main._check_launch(chosen)


def test_ranks_and_replays_get_what_auto_stands_for_and_the_pool_the_launchs_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Path(__file__).parents[2] / "examples/rl/models/Qwen3-8B"
    chosen = config(shape, run__dir=str(tmp_path), trainer__micro_batch_tokens="auto")
    plan = make_plan(chosen, device="cpu", files=False)
    assert plan.config == with_trainer(chosen, recompute="none", micro_batch_tokens=8192)
    trained: list[Any] = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(main, "redirect_output", lambda file: io.StringIO())
    monkeypatch.setattr(main, "_take_over", lambda config: None)
    monkeypatch.setattr(main, "_train", lambda *arguments: trained.extend(arguments[:2]))
    assert main.run(chosen, plan) == 0
    assert trained == [chosen, plan.config]
    assert load_config(tmp_path / "config.yaml", []) == plan.config
