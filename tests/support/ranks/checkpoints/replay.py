"""Steps trained from recorded batches, and the same steps trained from memory."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megarl.cli.replay import read_schedule, replay_steps
from megarl.config.loading.load import load_config
from megarl.rollout.admission.admission_log import SCHEDULE_FILE
from megarl.run.record.batch_metrics import record_batch
from megarl.run.step.plan import plan_step
from megarl.run.step.step import train_step
from megarl.telemetry.metrics.declarations import REGISTRY, step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer.policy import Policy
from tests.support.ranks.models.layouts import make_layout
from tests.support.ranks.training.policy import built_policy, exported
from tests.support.trainer.recorded_steps import make_batch, make_batch_with_drops, version_of


def _timeless(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if REGISTRY.lookup(name).reproducible}


def _policy(run_dir: Path, layout: dict[str, Any]) -> AbstractContextManager[Policy]:
    return built_policy(load_config(run_dir / "config.yaml"), make_layout(**layout), seed=0)


def replay(run_dir: Path, steps: int, layout: dict[str, Any] | None = None) -> dict[str, Any]:
    """This rank's final weights and each step's metrics, from the recorded batches and any schedule."""
    with _policy(run_dir, layout or {}) as policy:
        metrics: list[dict[str, float]] = []
        replay_steps(
            policy,
            policy.config,
            run_dir / "batches",
            range(steps),
            lambda _, values: metrics.append(_timeless(values)),
            read_schedule(run_dir / SCHEDULE_FILE),
        )
        return {"weights": exported(policy), "metrics": metrics}


def train_in_memory(run_dir: Path, steps: int, *, drops: bool = False) -> dict[str, Any]:
    """The same steps without the dump, on one rank. `drops`: those of `make_batch_with_drops`."""
    with _policy(run_dir, {}) as policy:
        timer, metrics, collected = PhaseTimer(), step_metrics(), []
        for step in range(steps):
            rows = {row.key: row for row in (make_batch_with_drops if drops else make_batch)(step)}
            plan = plan_step([row.tag for row in rows.values()], policy.config, dp_size=1, version=version_of(step))
            trained = train_step(policy, plan, rows, policy.config, timer, metrics, step=step)
            record_batch(metrics, plan, trained)
            collected.append(_timeless(metrics.reduce() | timer.finish_step()))
        return {"weights": exported(policy), "metrics": collected}
