"""The cost of the monitor in trainer rank 0: sources of tokens, comparison of log-probs, metrics, rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from observability_base import LAGS, REPLICAS, StepSize, cpu_per_step, recording

from megarl.algorithms.source_gaps import SourceGaps
from megarl.algorithms.stats import LossStats
from megarl.config.schema import Config
from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan
from megarl.run.compare_logprobs import StepMeasures
from megarl.run.run_monitor import RunMonitor
from megarl.run.step_plan import StepPlan, plan_step
from megarl.run.update_metrics import record_measures
from megarl.telemetry.declarations import step_metrics

SAMPLES_PER_GROUP = 16  # as in the config of `recording`
VERSION = LAGS - 1


def of_monitor(size: StepSize, steps: int, directory: Path) -> tuple[float, dict[str, Any]]:
    """The work of a step that serves the monitor alone, as in `train_step` and `Policy.update`, on one rank.

    The comparison is computed on the CPU here; on a GPU the processor only starts its operations.
    """
    rows = _rows(size)
    with recording(directory, "") as config:
        plan = plan_step([row.tag for row in rows], config, dp_size=1, version=VERSION)
        step = _step_of(rows, plan, config, size.micro_batches)
        seconds = cpu_per_step(step, steps)
    tokens = sum(len(row.response_ids) for row in rows)
    return seconds, {"tokens": tokens, "replicas": REPLICAS, "version_lags": LAGS, "micro_batches": size.micro_batches}


def _step_of(
    rows: list[Trajectory], plan: StepPlan, config: Config, micro_batches: int
) -> Callable[[int], object]:  # fmt: skip
    metrics = step_metrics()
    pool = SimpleNamespace(quarantine=lambda replica, reason: False)
    monitor = RunMonitor(config, pool, SimpleNamespace(metrics=metrics, say=lambda text: None))  # type: ignore[arg-type]
    engine_R = torch.tensor([each for row in rows for each in row.rollout_logprobs])
    trainer_R, keep_R = engine_R + 0.01, torch.ones(engine_R.numel(), dtype=torch.bool)
    cuts = torch.tensor([0, engine_R.numel()], dtype=torch.int32)
    compared = LossStats.of_pair(engine_R, trainer_R, keep_R, cuts).means() | {"entropy": 1.0}
    versions = [VERSION] * len(rows)
    tags: list[SampleTag] = list(plan.tags.values())

    def step(_: int) -> None:
        measured = StepMeasures.begin(tags, config)
        sources_R = torch.cat(measured.sources.of_rows(rows, versions))
        gaps = SourceGaps.zeros(measured.sources.buckets.size)
        parts = (part.chunk(micro_batches) for part in (engine_R, trainer_R, keep_R, sources_R))
        for engine, trainer, keep, sources in zip(*parts, strict=True):
            gaps.add(engine, trainer, keep, sources)
        measured.compare_in_update(compared, gaps)
        record_measures(metrics, measured)
        monitor.watch(plan, measured)
        monitor.act(VERSION + 1)
        metrics.reduce()

    return step


def _rows(size: StepSize) -> list[Trajectory]:
    """The trajectories of a step: each has tokens of two replicas and two version lags, half of the groups a signal."""
    length, made = size.tokens * size.turns, []
    cut = max(1, length // 2)
    for number in range(size.trajectories):
        group, index = divmod(number, SAMPLES_PER_GROUP)
        first, second = group % REPLICAS, (group + 1) % REPLICAS
        lag = group % (LAGS - 1)
        spans = [VersionSpan(VERSION - lag - 1, 0, cut, replica=first)]
        if cut < length:
            spans.append(VersionSpan(VERSION - lag, cut, length, replica=second))
        reward = float(index % 2 and group % 2)
        logprobs = [-1.0] * length
        made.append(
            Trajectory(group, index, [1, 2, 3], [5] * length, logprobs, tuple(spans), "stop", reward)
        )  # fmt: skip
    return made
