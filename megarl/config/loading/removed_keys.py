"""Keys of earlier versions, and verl's names: each is refused with advice."""

import json
import logging
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from megarl.config.schema import DEFAULT_INTERVAL

logger = logging.getLogger(__name__)

Tree = Mapping[str, Any]  # a config's plain values
CLIPS = ("clip_low", "clip_high", "clip_dual")

Advice = str | Callable[[Tree], str]  # a function computes what to write from the config's values

# By dotted key, without list indices. A removed section is one row, which covers the keys below it.
REMOVED: dict[str, Advice] = {
    "door": "write gateway, whose keys are the same",
    "trainer.compile_logprobs": "remove it: GPUs compile the log-prob head, and run it uncompiled where that fails",
    "trainer.fused_weight_gradients": "remove it: Transformer Engine's modules always fuse weight gradients",
    **{
        f"sampling.{name}": "remove it: responses to train on are sampled from the whole distribution, or every "
        "importance ratio would be wrong; evaluation.sampling has top_p, top_k and repetition_penalty"
        for name in ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    },
    "agent.act_attempts": "remove it: a sample is begun three times if its gateway dies",
    "checkpoint.hf_export_every": "write checkpoint.keep_every, and convert a kept step with `megarl convert export`",
    "checkpoint.keep_best_mode": "remove it: the checkpoint with the largest value is kept",
    "ray.num_cpus": "remove it: Ray's logical CPUs are those that the plan needs",
    "trainer.logprob_chunk_tokens": "remove it: logits are computed for 1,024 tokens at a time",
    "reward.min_errors": "remove it: the least is 16 failures; reward.max_error_share: 1 accepts any number",
    "admission.refill_limit": "remove it: at most 10 x batch.groups groups are replaced per step",
    "trainer.idle_logprobs": "remove it: a step computes its log-probs when its batch is complete",
    "evaluation.pin": "remove it: an evaluation next to training reports the versions of its tokens; "
    "evaluation.concurrent: false evaluates one version",
    "rollout.back_pressure": "remove it: requests are always held back from an engine whose KV cache is full",
    "launch.allow_open_torchrun": "remove it: start torchrun with --rdzv-backend megarl; another rendezvous over "
    "several hosts is refused (SECURITY.md)",
    "launch.node_cpus": 'remove it and write launch.sbatch: ["--cpus-per-task=N"]',
    "launch.node_gpus": 'remove it and write launch.sbatch: ["--gpus-per-node=N"]',
    "monitor.hysteresis": "remove it: an alarm ends when its value is better than the threshold by 10%",
    **{
        f"monitor.{name}": f"write monitor.rules.{name}"
        for name in ("ess", "k3_kl", "ratio_tail", "logprob_gap", "truncated", "no_signal", "entropy")
    },
    "monitor.replica_gap": "write monitor.rules.replica_gap; its floor is 0.03 nats",
    "monitor.most_quarantines": "remove it: a replica is quarantined three times at most",
    "monitor.max_skipped_steps": "remove it: alarms may skip five steps of a start",
    **{f"telemetry.{name}_gib": "write telemetry.keep_gib" for name in ("metrics", "samples", "tensorboard")},
    "telemetry.events": "write telemetry.events_mib: the MiB of each process, 0 for none",
    "weight_sync.staging_gib": "remove it: the first bucket of each trainer rank is built while the engines generate",
    "queue.capacity": "remove it: admission.max_staleness bounds what is generated ahead, and so the queue",
    "timeouts.queue_s": "write timeouts.rpc_s, which bounds reads and writes of the queue too",
    "timeouts.ray_start_s": "remove it: Ray's start may take a third of timeouts.engine_start_s",
    "timeouts.collective_s": "write timeouts.save_s, which bounds a collective of the trainer too",
    "rollout.dtype": "remove it: engines compute in trainer.precision, as the trainer does",
    "rollout.enforce_eager": "write rollout.engine_kwargs.enforce_eager",
    "rollout.cpu_kv_cache_gib": "remove it: an engine without a GPU has 1 GiB for its KV cache",
    "teachers.placement": "write reference.placement, which is for teachers in the trainer too",
    "teachers.max_num_seqs": "remove it: an engine of a teacher scores 64 sequences at once",
    "gateway.request_timeout_s": "write timeouts.generate_s, which bounds a request to the gateway too",
    "gateway.session_idle_s": "remove it: a session that is unused for twice timeouts.generate_s is dropped",
    "gateway.max_session_tokens": "remove it: all sessions have 100 million tokens at most",
    "gateway.max_sessions": "remove it: 100,000 sessions may be open",
    "telemetry.mlflow_uri": "set the environment variable MLFLOW_TRACKING_URI",
    "telemetry.entropy_every": "remove it: each step measures the entropy in its first update",
    **{f"algorithm.{name}": f"write algorithm.loss_options.{name}" for name in CLIPS},
}


def advice_on(key: str, tree: Tree) -> str | None:
    """Return advice on `key`, a dotted key without list indices, or None; `tree`: the values of the whole config."""
    advice = REMOVED.get(key)
    if advice is None and (advice := VERL.get(key.rpartition(".")[2])) is None:
        return None
    try:
        return advice(tree) if callable(advice) else advice
    except (ArithmeticError, LookupError, TypeError, ValueError):  # not a value that the key could have
        return "docs/coming-from.md has a table of verl's names"


def without_removed(tree: Tree) -> dict[str, Any]:
    """Return a config written by an earlier version without removed keys.

    Bounds of the policy loss become options of the loss, so that a resumed run trains with the same ones.
    """
    kept, algorithm = _without_removed(tree), _section(tree, "algorithm")
    dtype, precision = _section(tree, "rollout").get("dtype"), _section(tree, "trainer").get("precision", "bf16")
    if dtype not in (None, "auto", {"fp32": "float32", "bf16": "bfloat16"}.get(precision)):
        logger.warning("rollout.dtype: %s of the stored config is ignored: engines use trainer.precision", dtype)
    if clips := {name: algorithm[name] for name in CLIPS if algorithm.get(name) is not None}:
        kept["algorithm"]["loss_options"] = clips | (kept["algorithm"].get("loss_options") or {})
    return kept


def _without_removed(tree: Tree, prefix: str = "") -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        if key == "door":
            kept["gateway"] = _without_removed(value, "gateway.") if isinstance(value, Mapping) else value
            continue
        if key in REMOVED or (value is None and name in VERL):  # two of verl's were keys, null by default
            continue
        if isinstance(value, list):
            kept[name] = [_without_removed(each, f"{key}.") if isinstance(each, Mapping) else each for each in value]
        else:
            kept[name] = _without_removed(value, f"{key}.") if isinstance(value, Mapping) else value
    return kept


def _interval(tree: Tree) -> str:
    return f"write admission.sync_interval: {_sync_interval(tree)}; megarl counts updates and verl fetches"


def _staleness(tree: Tree) -> str:
    interval = _sync_interval(tree)
    # The decimal of the config: 0.28 * 25 is above 7 in floats.
    ahead = math.ceil(Fraction(str(_given(tree, "staleness_threshold"))) * interval)
    return f"write admission.max_staleness: {interval - 1 + ahead}, with admission.mode: async"


def _mini_batches(tree: Tree) -> str:
    return f"write trainer.mini_batches: {json.dumps(_given(tree, 'require_batches'))}"


def _old_logprobs(tree: Tree) -> str:
    return f"write algorithm.old_logprobs: {'rollout' if _given(tree, 'use_rollout_log_probs') else 'trainer'}"


def _weight(tree: Tree) -> str:
    """Translate verl's kind of weight and its threshold: one bound, or two as "low_high"."""
    kind, threshold = _given(tree, "rollout_is"), _given(tree, "rollout_is_threshold")
    low, banded, high = str(threshold).partition("_")
    kinds = {"token": ("token_tis", "icepop"), "sequence": ("sequence_tis", "sequence_mis"), "None": ("none", "none")}
    values: dict[str, object] = {}
    if kind is not None or threshold is None:
        values["kind"] = kinds[str(kind)][bool(banded)]
    if banded:
        values |= {"low": float(low), "high": float(high)}
    elif threshold is not None:
        values["cap"] = float(str(threshold))
    return f"write algorithm.correction: {_flow(values)}"


def _masks(tree: Tree) -> str:
    """Translate verl's masks: comma-separated kinds and bounds, each one bound or two as "low_high"."""
    kinds = [kind.strip() for kind in str(_given(tree, "rollout_rs")).split(",")]
    bounds = [bound.strip() for bound in str(_given(tree, "rollout_rs_threshold")).split(",")]
    masks = []
    for kind, bound in zip(kinds, bounds * len(kinds) if len(bounds) == 1 else bounds, strict=True):
        low, banded, high = bound.rpartition("_")
        masks.append({"kind": kind} | ({"low": float(low)} if banded else {}) | {"high": float(high)})
    return f"write algorithm.correction: {_flow({'masks': masks, 'denominator': 'kept'})}"


def _sync_interval(tree: Tree) -> int:
    """Return the updates between publications, from verl's names or megarl's."""
    own, fetches, required = (
        _count(_given(tree, name)) for name in ("sync_interval", "trigger_parameter_sync_step", "require_batches")
    )
    if own is not None:
        return own
    if fetches is not None:
        return fetches * (required or 1)
    updates = required or _count(_section(tree, "trainer").get("mini_batches")) or 1
    return math.ceil(DEFAULT_INTERVAL / updates) * updates


def _count(value: object) -> int | None:
    if value is not None and type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value


def _given(tree: Tree, name: str) -> object:
    """Return the value of a name in the sections that may have verl's names, or None."""
    algorithm = _section(tree, "algorithm")
    sections = (_section(tree, "admission"), algorithm, _section(algorithm, "correction"))
    return next((section[name] for section in sections if name in section), None)


def _section(tree: Tree, name: str) -> Tree:
    section = tree.get(name)
    return section if isinstance(section, Mapping) else {}


def _flow(value: object) -> str:
    return json.dumps(value).replace('"', "")


# verl's names (0.9.1) in any section, except those that are also megarl's keys.
VERL: dict[str, Advice] = {
    "trigger_parameter_sync_step": _interval,
    "staleness_threshold": _staleness,
    "require_batches": _mini_batches,
    "use_rollout_log_probs": _old_logprobs,
    "rollout_is": _weight,
    "rollout_is_threshold": _weight,
    "rollout_rs": _masks,
    "rollout_rs_threshold": _masks,
    "rollout_is_batch_normalize": "remove it: weights are not divided by their mean, which would hide a low mean; "
    "algorithm.correction.cap bounds them",
    "bypass_mode": "write algorithm.old_logprobs: rollout with algorithm.correction: {kind: none}, which is the ratio "
    "to the engine's log-probs",
}
