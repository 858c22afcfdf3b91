"""One step on given trajectories, with a mistake in it, and what it has counted on one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.queue.trajectory import Trajectory
from megarl.run.step import step as step_module
from megarl.run.step.plan import CountersDiffer, plan_step
from megarl.run.step.step import train_step
from megarl.telemetry.metrics.declarations import step_metrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.trainer import parallel
from megarl.trainer import policy as policy_module
from megarl.trainer.batch import MicroBatch, pack
from tests.support.ranks.training.policy import policy_under


def counted(
    model_dir: Path, rows: list[Trajectory], layout: dict[str, Any], mistake: str = "none", **changes: Any
) -> set[int] | str:
    """Return the groups that a step says it has trained, or why it was refused."""
    with policy_under(model_dir, layout, **changes) as policy, MISTAKES[mistake]():
        plan = plan_step([row.tag for row in rows], policy.config, dp_size=parallel.dp_size(), version=0)
        try:
            by_key = {row.key: row for row in rows}
            return train_step(policy, plan, by_key, policy.config, PhaseTimer(), step_metrics(), step=0)
        except CountersDiffer as error:
            return str(error)


def _mini_batches(change: Callable[[list[Any]], list[Any]]) -> Any:
    original = step_module._mini_batches
    return mock.patch.object(step_module, "_mini_batches", lambda *each: change(list(original(*each))))


def _micro_batches(change: Callable[[list[MicroBatch]], list[MicroBatch]]) -> Any:
    """Change what the pipeline gets, after all checks of what was packed."""
    original = policy_module.forward_backward

    def changed(chunks: Any, micro_batches: Any, *rest: Any) -> Any:
        return original(chunks, change(list(micro_batches)), *rest)

    return mock.patch.object(policy_module, "forward_backward", changed)


def _emptied(batch: MicroBatch) -> MicroBatch:
    return pack([], [], 1, streams=list(batch.streams))


MISTAKES: dict[str, Callable[[], Any]] = {
    "none": lambda: _micro_batches(lambda batches: batches),
    "a group left out": lambda: _mini_batches(lambda parts: parts[1:]),
    "a group trained twice": lambda: _mini_batches(lambda parts: [*parts, parts[0]]),
    "micro-batches left out": lambda: _micro_batches(lambda batches: [_emptied(each) for each in batches]),
    "a micro-batch left out": lambda: _micro_batches(lambda batches: [_emptied(batches[0]), *batches[1:]]),
    "micro-batches trained twice": lambda: _micro_batches(lambda batches: batches * 2),
}
