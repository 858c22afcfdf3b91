"""Whole runs of a mixture of experts whose trainer replays the experts that the engines chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.run import ON_POLICY_MAX, ON_POLICY_MEAN, Run, tiny_config, train
from tests.support.trainer.configs import with_changes

pytestmark = pytest.mark.engine
MIXTURE = {"num_hidden_layers": 6, "num_experts": 32, "num_experts_per_tok": 4, "mlp_only_layers": [1]}
WIDE = {**MIXTURE, "hidden_size": 128, "moe_intermediate_size": 64, "mlp_only_layers": []}
R3 = {"trainer__router_replay": "r3"}


def run_config(directory: Path, model: dict[str, Any] = MIXTURE, **changes: Any) -> dict[str, Any]:
    return with_changes(tiny_config(directory, family="qwen3_moe", **model), changes)


def run(tree: dict[str, Any]) -> Run:
    done = train(tree)
    assert done.code == 0, done.output[-4000:]
    assert [record["step"] for record in done.metrics] == list(range(1, tree["run"]["steps"] + 1))
    assert not any(record["batch/failed_samples"] for record in done.metrics)
    return done


def assert_exact(done: Run) -> None:
    for record in done.metrics:
        assert record["policy/grad_norm"] > 0
        assert record["mismatch/logprob_abs_diff_mean"] <= ON_POLICY_MEAN
        assert record["mismatch/logprob_abs_diff_max"] <= ON_POLICY_MAX


CASES: dict[str, dict[str, Any]] = {
    "experts": {"trainer__parallel": {"expert": 2}},
    "context": {"trainer__parallel": {"context": 2, "expert": 2}},
    "shared GPUs": {"rollout__share_gpus": True},
}


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each != "experts")) for each in CASES])
def test_the_trainer_computes_what_the_engines_did(tmp_path: Path, case: str) -> None:
    """In parts that agent workers pass on, with layers computed again."""
    tree = run_config(
        tmp_path, **R3, trainer__recompute="full", rollout__agent_workers=1, rollout__report_interval_s=0.05,
        run__steps=3, **CASES[case],
    )  # fmt: skip
    assert_exact(run(tree))


@pytest.mark.slow
def test_in_bf16_what_is_left_is_far_less(tmp_path: Path) -> None:
    """Routers of nearly equal scores choose other experts in the trainer, unless they replay the engine's."""
    free, replayed = (
        run(
            run_config(
                tmp_path / mode, WIDE, trainer__router_replay=mode, trainer__precision="bf16", sampling__max_tokens=48
            )
        )
        for mode in ("none", "r3")
    )
    for before, after in zip(free.metrics, replayed.metrics, strict=True):
        assert after["mismatch/k3_kl"] <= before["mismatch/k3_kl"] / 10
        assert after["mismatch/logprob_abs_diff_max"] <= before["mismatch/logprob_abs_diff_max"] / 5
