"""What each rank of a test world runs for test_replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.commands.replay import replay_steps
from megarl.config.load import load_config
from megarl.models.export import HFExporter
from megarl.models.layout import Layout
from megarl.models.read_config import load_info
from megarl.run.batch_metrics import record_batch
from megarl.run.step import plan_step, train_step
from megarl.telemetry.declarations import REGISTRY, step_metrics
from megarl.telemetry.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer.policy import Policy


def _timeless(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if not REGISTRY.lookup(name).timing}


def _policy(run_dir: Path, layout: dict[str, Any]) -> Policy:
    full = Layout(**layout, world_size=torch.distributed.get_world_size())
    parallel.initialize(full, seed=0, timeout_s=60)
    config = load_config(run_dir / "config.yaml")
    return Policy(config, full, load_info(config.model.path))


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    exporter = HFExporter(policy.module_chunks, policy.info, torch.float32)
    return {item.name: value.clone() for item, value in exporter.stream() if value is not None}


def replay(run_dir: Path, steps: int, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """This rank's final weights and each step's metrics, from the recorded batches."""
    try:
        policy = _policy(run_dir, layout or {})
        metrics: list[dict[str, float]] = []
        replay_steps(
            policy,
            policy.config,
            run_dir / "batches",
            range(steps),
            lambda _, values: metrics.append(_timeless(values)),
        )
        return {"weights": _weights(policy), "metrics": metrics}
    finally:
        parallel.destroy()


def train_in_memory(run_dir: Path, steps: int) -> dict[str, Any]:
    """The same steps without the dump, on one rank."""
    from tests.test_replay import make_batch

    try:
        policy = _policy(run_dir, {})
        timer, metrics, collected = PhaseTimer(), step_metrics(), []
        for step in range(steps):
            rows = {row.key: row for row in make_batch(step)}
            plan = plan_step([row.tag for row in rows.values()], policy.config, dp_size=1, version=step)
            train_step(policy, plan, rows, policy.config, timer, metrics)
            record_batch(metrics, plan)
            collected.append(_timeless(metrics.reduce() | timer.finish_step()))
        return {"weights": _weights(policy), "metrics": collected}
    finally:
        parallel.destroy()
