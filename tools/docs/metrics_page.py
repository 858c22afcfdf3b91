"""Generates docs/metrics.md from the declarations."""

from __future__ import annotations

from megarl.telemetry.metrics.declarations import GROUPS, REGISTRY

_HEAD = """# Metrics

<!-- Generated from megarl/telemetry/metrics/declarations/ by `make docs`; do not edit. -->

Every step writes one line to `RUN_DIR/metrics.jsonl` (`step`, `wall_time` and the metrics below) and the same numbers
to TensorBoard, and to Weights & Biases, MLflow and Prometheus if configured; [observability](observability.md) says
what they are called there. A name that is not declared here is refused. The reducer defines how several values recorded
in one step (by mini-batches or ranks) are combined; `weighted` means weighted by tokens. Metrics marked ⏱ depend on the
clock or the machine, those marked ⚠ count what has gone wrong around the run (killed processes, lost engines, full
disks); all others repeat exactly in a deterministic run. NaN and infinities are written as null.
"""


def metrics_page() -> str:
    """Return the whole page in Markdown."""
    parts = [_HEAD]
    for group, meaning in GROUPS.items():
        parts.append(f"\n## `{group}/`\n\n{meaning}\n\n| metric | unit | reducer | meaning |\n|---|---|---|---|\n")
        for metric in REGISTRY:
            if metric.name.split("/", 1)[0] == group:
                mark = " ⏱" if metric.timing else " ⚠" if metric.faults else ""
                row = (f"`{metric.name}`{mark}", metric.unit, metric.reducer, metric.meaning)
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n")
    return "".join(parts)
