"""Generates docs/reference/metrics.md from the declarations."""

from __future__ import annotations

from megarl.telemetry.metrics.declarations import GROUPS, REGISTRY
from megarl.telemetry.metrics.registry import Metric

# What to look at first, in the order of the questions: does it learn, is it sound, is it fast.
CORE = (
    "reward/mean", "reward/accuracy", "eval/{set}/greedy", "eval/{set}/sampled",
    "rollout/response_length_mean", "rollout/truncated_share",
    "groups/trained", "groups/filtered", "groups/dropped_stale", "groups/failed",
    "policy/entropy", "policy/approx_kl", "policy/clip_fraction", "policy/grad_norm", "policy/lr",
    "mismatch/logprob_abs_diff_mean", "correction/ess", "batch/staleness_max",
    "time/step", "time/trainer_idle_ratio", "rollout/idle_ratio", "sync/seconds",
    "perf/tokens_per_second_per_gpu", "perf/trainer_peak_memory_gib", "rollout/replicas_lost",
)  # fmt: skip

_HEAD = """# Metrics

<!-- Generated from megarl/telemetry/metrics/declarations/ by `make docs`; do not edit. -->

Every step writes one line to `RUN_DIR/metrics.jsonl` (`step`, `wall_time` and the metrics below). TensorBoard,
Weights & Biases, MLflow and Prometheus get the same numbers if they are configured
([names there](../observability.md)). A name that is not declared here is refused.

The reducer combines several values of one step (of mini-batches or ranks); `weighted` means weighted by tokens. ⏱ marks
metrics that depend on the clock or the machine. ⚠ marks those that count what went wrong around the run (killed
processes, lost engines, full disks). All others repeat exactly in a deterministic run. NaN and infinities are written
as null.
"""
_TABLE = "| metric | unit | reducer | meaning |\n|---|---|---|---|\n"


def metrics_page() -> str:
    """Return the whole page in Markdown."""
    declared = {metric.name: metric for metric in REGISTRY}
    parts = [_HEAD, "\n## The first 25\n\nMost runs are judged by these.\n\n", _TABLE]
    parts += [_row(declared[name]) for name in CORE]
    for group, meaning in GROUPS.items():
        parts.append(f"\n## `{group}/`\n\n{meaning}\n\n{_TABLE}")
        parts += [_row(metric) for metric in REGISTRY if metric.name.split("/", 1)[0] == group]
    return "".join(parts)


def _row(metric: Metric) -> str:
    mark = " ⏱" if metric.timing else " ⚠" if metric.faults else ""
    cells = (f"`{metric.name}`{mark}", metric.unit, metric.reducer, metric.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
