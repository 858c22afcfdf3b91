"""Declares every metric of megarl once; `docs/reference/metrics.md` is generated from the tables of these files."""

from megarl.telemetry.metrics.declarations.of_batch import BATCH, DATA, PROMPT_GROUPS, REWARD
from megarl.telemetry.metrics.declarations.of_rollout import AGENT, ROLLOUT
from megarl.telemetry.metrics.declarations.of_run import EVAL, MONITOR, TOTAL
from megarl.telemetry.metrics.declarations.of_speed import PERF, SYNC, TIME
from megarl.telemetry.metrics.declarations.of_update import CORRECTION, MISMATCH, POLICY
from megarl.telemetry.metrics.registry import Registry, StepMetrics

GROUPS: dict[str, str] = {
    "reward": "Rewards of the step's samples, without failed samples.",
    "groups": "Prompt groups by outcome, and their difficulty.",
    "batch": "Contents of the update.",
    "data": "Each training set of `data.sets`; none with `data.path`.",
    "rollout": "Generation.",
    "agent": "Agents: their turns and their calls of tools; none with `agent.loop: single_turn`.",
    "policy": "The update, over every trained response token of the step.",
    "correction": "Importance weights and masks of the token losses, over every trained token, masked ones included, "
    "if there is a correction ([`algorithm.correction`](../training/async.md#corrections)).",
    "mismatch": "Engine against trainer, before the first update of the step: log-probs of the same tokens, under the "
    "same weights with `admission.mode: sync`, otherwise under weights that may be `rollout/version_lag_max` updates "
    "apart.",
    "monitor": "Alarms and what they did ([the monitor](../observability/monitor.md)).",
    "sync": "Weight sync from trainer to engines.",
    "time": "Seconds of the step by phase; phases do not overlap and add up to `time/step`.",
    "perf": "Speed and memory.",
    "eval": "Held-out evaluation, per set.",
    "total": "Totals since the start of the run.",
}

_TRAINING = [*REWARD, *PROMPT_GROUPS, *BATCH, *DATA, *ROLLOUT, *AGENT, *POLICY, *CORRECTION, *MISMATCH, *MONITOR]

REGISTRY = Registry([*_TRAINING, *SYNC, *TIME, *PERF, *EVAL, *TOTAL])


def step_metrics() -> StepMetrics:
    """Return an empty collector that uses megarl's registry."""
    return StepMetrics(REGISTRY)
