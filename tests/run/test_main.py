"""The mistakes that are refused before a run begins, and the config that its parts get."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl import platforms
from megarl.cluster.nodes.node_commands import LAUNCH_ID_VARIABLE
from megarl.common import processes
from megarl.config.fit import with_trainer
from megarl.config.load import load_config
from megarl.config.plan import make_plan
from megarl.platforms import Platform
from megarl.run import main, peers
from tests.support.configs import config


def test_a_bare_torchrun_does_not_start_several_nodes() -> None:
    chosen = config("model", trainer={"gpus": 2, "gpus_per_node": 1}, rollout={"replicas": 2, "gpus_per_node": 1})
    with pytest.raises(ValueError, match="needs 4 nodes, which a bare torchrun does not start"):
        main._check_launch(chosen)


class Stopped(Exception):
    """Ends a start when it has come far enough."""


@pytest.mark.parametrize(("launch_id", "index"), [(None, 6), ("launch-1", 1)])
def test_a_rank_chooses_its_gpu_before_it_joins_its_peers(
    monkeypatch: pytest.MonkeyPatch, launch_id: str | None, index: int
) -> None:
    """A rank alone sees all GPUs of the host; a node's agent shows its ranks those of the trainer only."""
    order: list[Any] = []

    def join(backend: str, timeout_s: float, run_dir: Path) -> None:
        order.append(f"joins over {backend}")
        raise Stopped

    def activate(index: int) -> Platform:
        order.append(index)
        return Platform(torch.device("cuda"), True, "nccl")

    monkeypatch.setenv("RANK", "3")  # rank 0 also launches the pool
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv(LAUNCH_ID_VARIABLE, raising=False)
    if launch_id is not None:
        monkeypatch.setenv(LAUNCH_ID_VARIABLE, launch_id)
    monkeypatch.setattr(processes, "die_with_parent", lambda: None)
    monkeypatch.setattr(peers, "join_peers", join)
    monkeypatch.setattr(platforms, "activate", activate)
    monkeypatch.setattr(main, "StopSignals", lambda *_, **__: SimpleNamespace(install=lambda: order.append("signals")))
    chosen = config("model")
    plan: Any = SimpleNamespace(pools=SimpleNamespace(trainer=SimpleNamespace(devices=(4, 6))))
    with pytest.raises(Stopped):
        main._train(chosen, chosen, plan, io.StringIO())
    assert order == ["signals", index, "joins over nccl"]


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
    monkeypatch.setattr(main, "_train", lambda *arguments: trained.extend(arguments[:2]) or 0)
    assert main.run(chosen, plan) == 0
    assert trained == [chosen, plan.config]
    assert load_config(tmp_path / "config.yaml", []) == plan.config
