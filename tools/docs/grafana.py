"""The dashboard for Grafana, docs/reference/grafana.json, made from a table of panels. Pure.

The table names metrics as they are declared; `prometheus_names` knows what they are called in Prometheus.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.telemetry.metrics.declarations import REGISTRY
from megarl.telemetry.metrics.timer import PHASES
from megarl.telemetry.sinks import prometheus_names as names

COLUMNS = 24  # of Grafana's grid
HEIGHT = 8  # grid rows of a panel
STAT_HEIGHT = 4
SCHEMA = 39  # of Grafana 10.4; later versions convert it when they load it
_RUN = 'run=~"$run"'
_BY_NAME = {metric.name: names.name_of(metric) for metric in REGISTRY}


@dataclass(frozen=True)
class Panel:
    """One plot. `series`: declared metrics with their legends; `unit`: Grafana's; `style`: lines, stacked or stat.

    `formula`: what stands around a series in PromQL, `{}` for the series itself.
    """

    title: str
    series: Sequence[tuple[str, str]]
    unit: str = "short"
    style: str = "lines"
    formula: str = "{}"


SHARE, SECONDS, RATE = "percentunit", "s", "short"
ROWS: tuple[tuple[str, Sequence[Panel]], ...] = (
    (
        "Progress",
        (
            Panel("Step", [(names.STEPS_DONE.name, "{{run}}")], style="stat"),
            Panel("Done", [(names.STEPS_DONE.name, "{{run}}")], SHARE, "stat",
                  "{} / on (run) " + f"{names.STEPS_PLANNED.name}{{{_RUN}}}"),
            Panel("Time to the end", [("time/eta", "{{run}}")], SECONDS, "stat"),
            Panel("Since the newest step", [(names.LAST_STEP.name, "{{run}}")], SECONDS, "stat", "time() - {}"),
        ),
    ),
    (
        "Reward",
        (
            Panel("Reward", [("reward/mean", "mean"), ("reward/shaped_mean", "shaped"),
                             ("reward/stderr", "standard error")]),
            Panel("Accuracy", [("reward/accuracy", "samples"), ("groups/solve_all", "groups all right"),
                               ("groups/solve_none", "groups all wrong")], SHARE),
            Panel("Reward components", [("reward/component/{component}", "{{component}}")]),
            Panel("Response length", [("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "max"),
                                      ("rollout/response_length_p{percent}", "p{{percent}}")]),
            Panel("Truncated and aborted", [("rollout/truncated_share", "truncated"),
                                            ("rollout/aborted_share", "aborted")], SHARE),
            Panel("Training sets", [("data/{set}/reward_mean", "{{set}}")]),
        ),
    ),
    (
        "Evaluation",
        (
            Panel("Greedy, 95% interval", [("eval/{set}/greedy", "{{set}}"), ("eval/{set}/greedy_low", "{{set}} low"),
                                           ("eval/{set}/greedy_high", "{{set}} high")], SHARE),
            Panel("Sampled, 95% interval",
                  [("eval/{set}/sampled", "{{set}}"), ("eval/{set}/sampled_low", "{{set}} low"),
                   ("eval/{set}/sampled_high", "{{set}} high")], SHARE),
            Panel("pass@k and maj@k", [("eval/{set}/pass@{k}", "{{set}} pass@{{k}}"),
                                       ("eval/{set}/maj@{k}", "{{set}} maj@{{k}}")], SHARE),
        ),
    ),
    (
        "Update",
        (
            Panel("KL", [("policy/approx_kl", "old || new"), ("policy/kl_ref", "reference"),
                         ("mismatch/k3_kl", "engine || trainer")]),
            Panel("Entropy", [("policy/entropy", "entropy")]),
            Panel("Gradient norm", [("policy/grad_norm", "mean"), ("policy/grad_norm_max", "max")]),
            Panel("Ratios", [("policy/ratio", "mean"), ("policy/ratio_max", "max")]),
            Panel("Clipped and capped", [("policy/clip_fraction", "clipped"), ("correction/capped_share", "capped")],
                  SHARE),
            Panel("Effective sample size", [("policy/ess", "update"), ("mismatch/ess", "mismatch"),
                                            ("correction/ess", "correction")], SHARE),
            Panel("Loss", [("policy/loss", "objective"), ("policy/policy_loss", "policy")]),
            Panel("Learning rate", [("policy/lr", "lr")]),
        ),
    ),
    (
        "Lag and queue",
        (
            Panel("Version lag", [("rollout/version_lag_mean", "mean"), ("rollout/version_lag_max", "max"),
                                  ("batch/staleness_p95", "trained p95"), ("batch/staleness_max", "trained max")]),
            Panel("Tokens by version lag", [("rollout/version_lag_tokens/{lag}", "lag {{lag}}")], style="stacked"),
            Panel("Queue", [("rollout/queue_depth", "finished groups"),
                            ("rollout/groups_reusable", "reusable groups")]),
            Panel("Groups by outcome", [("groups/trained", "trained"), ("groups/filtered", "filtered"),
                                        ("groups/dropped_stale", "dropped as stale"), ("groups/failed", "failed")],
                  style="stacked"),
        ),
    ),
    (
        "Throughput and load",
        (
            Panel("Tokens per second", [("perf/rollout_tokens_per_second", "rollout"),
                                        ("perf/trainer_tokens_per_second", "trainer"),
                                        ("perf/tokens_per_second", "whole job")], RATE),
            Panel("Tokens per second and GPU", [("perf/rollout_tokens_per_second_per_gpu", "rollout"),
                                                ("perf/trainer_tokens_per_second_per_gpu", "trainer"),
                                                ("perf/tokens_per_second_per_gpu", "whole job")], RATE),
            Panel("Tokens per second of each replica",
                  [("rollout/replica_tokens_per_second/{replica}", "replica {{replica}}"),
                   ("rollout/replica_tokens_per_second_min", "slowest"),
                   ("rollout/replica_tokens_per_second_max", "fastest")], RATE),
            Panel("MFU", [("perf/trainer_mfu", "trainer")], SHARE),
            Panel("KV cache of the fullest engine", [("rollout/kv_usage_max", "in use")], SHARE),
            Panel("Requests of the busiest engine", [("rollout/running_max", "running"),
                                                     ("rollout/waiting_max", "waiting")]),
            Panel("Time of a sample", [("rollout/generate_seconds_p50", "p50"), ("rollout/generate_seconds_p95", "p95"),
                                       ("rollout/generate_seconds_p99", "p99"),
                                       ("rollout/generate_seconds_max", "max")], SECONDS),
            Panel("Trainer memory", [("perf/trainer_peak_memory_gib", "device peak"),
                                     ("perf/host_memory_gib", "host")], "none"),
        ),
    ),
    (
        "Waiting",
        (
            Panel("Idle share of both sides", [("time/trainer_idle_ratio", "trainer"),
                                               ("rollout/idle_ratio", "engines")], SHARE),
            Panel("Time of a step by phase", [*((f"time/{phase}", phase) for phase in PHASES if phase != "eval"),
                                              ("time/other", "other")], SECONDS, "stacked"),
            Panel("Weight sync", [("sync/seconds", "whole"), ("sync/pause_seconds", "engines paused"),
                                  ("sync/digest_seconds", "digests")], SECONDS),
            Panel("Overhead", [("time/overhead_share", "share of the step")], SHARE),
        ),
    ),
    (
        "Faults",
        (
            Panel("Replicas", [("rollout/replicas_alive", "alive"), ("rollout/replicas_lost", "lost"),
                               ("rollout/replicas_idle", "idle"), ("rollout/workers_alive", "agent workers")]),
            Panel("Replaced and continued", [("sync/restarted_replicas", "replicas replaced in a sync"),
                                             ("rollout/continued", "responses continued elsewhere"),
                                             ("rollout/workers_lost", "agent workers lost"),
                                             ("rollout/groups_redone", "groups of lost workers")]),
            Panel("Failed", [("groups/failed", "groups"), ("batch/failed_samples", "samples"),
                             ("reward/errors", "rewards"), ("rollout/cut", "responses cut at a deadline")]),
            Panel("Alarms of the monitor", [("monitor/alarms", "in the step"), ("monitor/active", "active after it"),
                                            ("monitor/skipped", "batches skipped"),
                                            ("monitor/forced_syncs", "publications forced"),
                                            ("monitor/quarantined", "replicas quarantined")]),
            Panel("Since the start", [("rollout/rebuilds", "controller and queue started again"),
                                      ("total/groups_rolled_back", "groups rolled back"),
                                      ("total/failed_writes", "failed writes")]),
        ),
    ),
)  # fmt: skip


def dashboard() -> str:
    """Return the whole file as JSON text."""
    content = {
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "title": "megarl",
        "uid": "megarl-runs",
        "tags": ["megarl"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [_source_variable(), _run_variable()]},
        "panels": list(_panels()),
    }
    return json.dumps(content, indent=1) + "\n"


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    query = f"label_values({names.INFO.name}, {names.RUN_LABEL})"
    return {
        "name": "run", "label": "run", "type": "query", "datasource": _source(), "query": query, "definition": query,
        "refresh": 2, "multi": True, "includeAll": True, "sort": 1,
    }  # fmt: skip


def _source() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _panels() -> Iterator[dict[str, Any]]:
    """Yield a row's title and its panels, three or four side by side."""
    number, y = 1, 0
    for title, panels in ROWS:
        yield {
            "id": number, "type": "row", "title": title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }  # fmt: skip
        number, y = number + 1, y + 1
        across = 4 if len(panels) % 4 == 0 else 3
        height = STAT_HEIGHT if panels[0].style == "stat" else HEIGHT
        for index, panel in enumerate(panels):
            place = {"x": index % across * (COLUMNS // across), "y": y + index // across * height,
                     "w": COLUMNS // across, "h": height}  # fmt: skip
            yield _panel(panel, number, place)
            number += 1
        y += -(-len(panels) // across) * height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    found = [_BY_NAME[name] if name in _BY_NAME else names.all_names()[name] for name, _ in panel.series]
    legends = [legend if "{{run}}" in legend else "{{run}} " + legend for _, legend in panel.series]
    custom = {"drawStyle": "line", "showPoints": "never", "spanNulls": True}
    if panel.style == "stacked":
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal"}}
    return {
        "id": number,
        "type": "stat" if panel.style == "stat" else "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"{name.name}: {name.text}" for name in found),
        "datasource": _source(),
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **({} if panel.style == "stat" else {"custom": custom})},
            "overrides": [],
        },
        "options": {} if panel.style == "stat" else {"tooltip": {"mode": "multi"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _source(),
                "expr": panel.formula.replace("{}", f"{name.name}{{{_RUN}}}", 1),
                "legendFormat": legend,
            }
            for index, (name, legend) in enumerate(zip(found, legends, strict=True))
        ],
    }
