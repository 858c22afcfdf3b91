"""Steps on given trajectories under the run's monitor, and what one rank's monitor saw, said and did."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megarl.queue.trajectory import Trajectory
from megarl.run.loop.monitor import AlarmSkipsStep, AlarmStopsRun, RunMonitor
from megarl.run.step.plan import plan_step
from megarl.run.step.step import train_step
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer import parallel
from tests.support.ranks.training.policy import exported, policy_under


def _ignored(*reported: object) -> None:
    """Take what is recorded of an alarm, which these tests do not look at."""


def watched(
    model_dir: Path, steps: list[list[Trajectory]], layout: dict[str, Any] | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Return what each step said, took out and published at once, its metrics, and whether this rank's weights changed.

    The tokens of each step are of the weights that it updates.
    """
    found: list[dict[str, Any]] = []
    with policy_under(model_dir, layout or {}, **changes) as policy:
        config, metrics = policy.config, step_metrics()
        said: list[str] = []
        taken: list[int] = []
        pool = SimpleNamespace(quarantine=lambda replica, reason: taken.append(replica) or True)
        recorder = SimpleNamespace(metrics=metrics, say=said.append, alarm=_ignored, alarm_ended=_ignored)
        monitor = RunMonitor(config.monitor, pool, recorder)
        for version, rows in enumerate(steps):
            before, ended = exported(policy), ""
            plan = plan_step([row.tag for row in rows], config, dp_size=parallel.dp_size(), version=version)
            try:
                train_step(
                    policy, plan, {row.key: row for row in rows}, config, PhaseTimer(), metrics, step=version,
                    watch=monitor.watch,
                )  # fmt: skip
            except (AlarmSkipsStep, AlarmStopsRun) as error:
                ended = f"{type(error).__name__} after {error.updates} updates: {error}"
            publishes = monitor.act(version + 1)
            after = exported(policy)
            found.append(
                {
                    "said": list(said),
                    "taken": list(taken),
                    "publishes": publishes,
                    "ended": ended,
                    "metrics": metrics.reduce(),
                    "changed": any(not before[name].equal(after[name]) for name in before),
                }
            )
            said.clear()
            taken.clear()
    return found
