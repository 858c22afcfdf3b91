"""One training step, from its plan to an updated policy, using only the trainer's ranks.

`train_step` needs only a policy, the plan of `plan.py` and this rank's rows; the training loop and `megarl replay`
share it.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megarl.algorithms.correction.config import CorrectionSpec
from megarl.algorithms.correction.stats import CORRECTION_NUMBERS
from megarl.algorithms.objective.objective import GlobalCounts
from megarl.algorithms.objective.stats import SAMPLING
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.checks.telemetry import SourceBuckets
from megarl.config.derived.logprob_passes import (
    correction_of,
    interpolates_proximal,
    logprob_passes,
    recomputes_old_logprobs,
    rejection_of,
    teacher_passes,
)
from megarl.config.derived.teachers import teachers_by_set
from megarl.config.schema import Config
from megarl.queue.streams import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from megarl.queue.trajectory import Trajectory
from megarl.run.step.off_policy import StepMeasures, reject_before_updates, set_interpolation
from megarl.run.step.plan import StepPlan, check_trained
from megarl.run.step.samples import add_teacher_logprobs, distil, mini_batch_counts, set_advantages, train_samples
from megarl.telemetry.metrics.registry import StepMetrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.telemetry.trace import events
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import NonFiniteError, NoTokensError, Policy, StepRefused

_KEYS: Codec[list[str]] = codec_of(list[str])

# Gets the plan and the measurements, once a step, on every rank. It may raise StepRefused.
StepWatch = Callable[[StepPlan, StepMeasures], None]


def train_step(
    policy: Policy,
    plan: StepPlan,
    rows: Mapping[str, Trajectory],
    config: Config,
    timer: PhaseTimer,
    metrics: StepMetrics,
    *,
    step: int,
    watch: StepWatch = lambda plan, measured: None,
) -> set[int]:
    """Compute the log-probs that are missing, then make one optimizer update per mini-batch. Collective.

    `rows`: this DP rank's trajectories by key, at least those of `plan.keys_of(dp_rank)`. `step`: the number of steps
    before this one. `watch` is called before the first update changes a weight.

    Records `policy/*`, `correction/*`, `mismatch/*` and `reward/shaped_mean`. A mini-batch without a weight in any term
    of the loss makes no update; a step whose groups are all filtered makes none, and records `policy/updates` 0.

    Returns the ids of the groups that went through backward passes, on all replicas. Those of a mini-batch that makes
    no update count as trained, because nothing of them is left to train.

    Raises CountersDiffer unless these are the groups of the plan, each sample once. Raises NonFiniteError before any
    weight has changed, also if an engine returned a log-prob that is not finite, because its weights or arithmetic may
    be damaged. An exception of `watch` passes.
    """
    _refuse_bad_logprobs(plan)
    recomputes = recomputes_old_logprobs(config)
    samples = train_samples(plan, rows, config, parallel.dp_rank())
    policy.set_routes(samples.values(), {key: row.routes for key, row in rows.items()})
    _add_logprobs(policy, plan, samples, config, timer)
    measured = StepMeasures.begin(plan.tags.values(), SourceBuckets.of(config))
    if recomputes and plan.mini_batches:
        measured.compare_in_pass(samples, rows)
    set_advantages(plan, samples, rows, config.algorithm, metrics)
    distil(plan.tags, samples, teachers_by_set(config), config.algorithm.distill, metrics)
    kept: Mapping[str, int] | None = None
    before, in_updates = rejection_of(config), correction_of(config)
    if before is not None:
        in_updates = None  # it is recorded over every token that was trained before
        if plan.mini_batches:
            kept, numbers = reject_before_updates(samples, before)
            record_correction(metrics, numbers, before)
    parts, made = _mini_batches(plan, samples, config.sampling.max_tokens, kept), 0
    updates = [(mine, counts) for mine, counts in parts if counts.tokens]
    done = [sample.key for mine, counts in parts if not counts.tokens for sample in mine]

    def check(values: Mapping[str, float]) -> None:
        measured.compare_in_update(values, None if recomputes else policy.source_gaps)
        record_measures(metrics, measured)
        watch(plan, measured)

    with timer.phase("update"):
        for number, (mine, counts) in enumerate(updates):
            if interpolates_proximal(in_updates):
                set_interpolation(mine, rows, version=plan.version, updates=made)
            update = partial(
                policy.update, mine, counts, another_follows=number + 1 < len(updates),
                measure_entropy=made == 0, check=(lambda values: None) if made else check,
            )  # fmt: skip
            if (values := _make_update(update, mine, made, step)) is None:
                done += [sample.key for sample in mine]
                continue
            done += policy.trained_keys
            if made and not recomputes:
                measured.add_gaps(policy.source_gaps)
            made += 1
            record_update(metrics, values, in_updates)
    if not made:
        watch(plan, measured)
    metrics.record("policy/updates", made)
    with timer.phase("update"):
        everyone = parallel.dp_all_gather_object(done, _KEYS) if plan.mini_batches else [done]
    return check_trained(plan, itertools.chain.from_iterable(everyone))


def _add_logprobs(
    policy: Policy, plan: StepPlan, samples: Mapping[str, TrainSample], config: Config, timer: PhaseTimer
) -> None:
    """Give the samples the log-probs that the trainer and teachers compute. Collective.

    Raises NonFiniteError, on every rank, if one is not finite. The loss would show it too, but perhaps only after a
    first update of the step.
    """
    passes = logprob_passes(config) if plan.mini_batches else []
    with timer.phase("logprobs"):
        for stream in passes:
            found = policy.compute_logprobs(list(samples.values()), reference=stream == REFERENCE_LOGPROBS)
            for sample, logprobs_R in zip(samples.values(), found, strict=True):
                sample.streams[stream] = logprobs_R
        used = {key: plan.tags[key] for part in plan.mini_batches for keys in part for key in keys}
        add_teacher_logprobs(policy, used, samples, config)
    streams = [*passes, TEACHER_LOGPROBS] if teacher_passes(config) else passes
    if not streams:
        return
    own = [
        key
        for key, each in samples.items()
        if not all(each.streams[name].isfinite().all() for name in streams if name in each.streams)
    ]
    bad = [key for part in parallel.dp_all_gather_object(own, _KEYS) for key in part]
    if bad:
        raise NonFiniteError(
            f"the log-probs ({', '.join(streams)}) that the trainer computed are not finite in {len(bad)} samples (the "
            f"first: sample {bad[0]}); no weight was changed"
        )


def _make_update(
    update: Callable[[], dict[str, float]], mine: Sequence[TrainSample], made: int, step: int
) -> dict[str, float] | None:
    """Call `update` for the samples `mine` and record its time. Return its metrics; None if no token has a weight.

    `made`: the updates of the step before this one, which a refusal names.
    """
    begin = time.monotonic()
    try:
        values = update()
    except NoTokensError:
        return None
    except StepRefused as error:
        error.updates = made
        raise
    tokens = sum(len(each.prompt_ids) + len(each.response_ids) for each in mine)
    args = {"samples": len(mine), "tokens": tokens}
    events.record("mini_batch", begin, time.monotonic(), step=step + 1, args=args)
    return values


def _refuse_bad_logprobs(plan: StepPlan) -> None:
    """Raise NonFiniteError, on every rank, if a sample of the batch has failed by its engine's log-probs."""
    bad = [key for key, tag in plan.tags.items() if tag.bad_logprobs]
    if bad:
        raise NonFiniteError(
            f"the log-probs that the engines returned are not finite in {len(bad)} of {len(plan.tags)} samples (the "
            f"first: sample {bad[0]}); no weight was changed"
        )


def _mini_batches(
    plan: StepPlan, samples: Mapping[str, TrainSample], max_tokens: int, kept: Mapping[str, int] | None
) -> list[tuple[list[TrainSample], GlobalCounts]]:
    """Return this rank's samples of each mini-batch, and the counts of all ranks. `kept`: see `mini_batch_counts`.

    A mini-batch whose samples are all masked, as truncated or by a correction, makes no update: its counts are zero.
    """
    rank = parallel.dp_rank()
    return [
        ([samples[key] for key in parts[rank]], mini_batch_counts(plan, parts, max_tokens, kept))
        for parts in plan.mini_batches
    ]


# The declared metrics of an update, from the numbers that `Policy.update` returns, and of log-prob comparisons.

# Names in `LossStats` -> names of the metrics.
MISMATCH = {
    "logprob_abs_diff": "logprob_abs_diff_mean",
    "logprob_abs_diff_max": "logprob_abs_diff_max",
    "approx_kl": "k3_kl",
    "ess": "ess",
    "pearson": "logprob_pearson",
    "tokens": "tokens",
}
# The terms of the loss alongside `rl`: their counts in `LossStats`, and what is reported of them.
TERMS = {"ref_kl_tokens": ("kl_ref", "ref_kl_loss", "ref_kl_tokens"), "ce_tokens": ("ce", "ce_loss", "ce_tokens")}
# Names in `correction_numbers` -> names of the metrics, below `correction/`: shares of tokens, and of sequences.
CORRECTION = {
    "weight_mean": "weight_mean",
    "weight_max": "weight_max",
    "weight_capped": "capped_share",
    "weight_dropped": "masked_share",
    "weight_ess": "ess",
}
CORRECTION_OF_SEQUENCES = {
    "sequences_capped": "capped_sequences_share",
    "sequences_touched": "masked_sequences_share",
    "sequences_dropped": "dropped_sequences_share",
    "sequence_ess": "sequence_ess",
}
# Raw moments, and what only the comparison of engine and trainer reports.
HIDDEN = {"ratio_squared", "pearson"}


def record_update(metrics: StepMetrics, values: Mapping[str, float], correction: CorrectionSpec | None) -> None:
    """Record `policy/*`, and `correction/*` of a `correction` that acts in the updates.

    Of the terms `ref_kl` and `ce` only if they have tokens.
    """
    terms = {name for names in TERMS.values() for name in names}
    hidden = HIDDEN | CORRECTION_NUMBERS | terms
    shown = {name: value for name, value in values.items() if name not in hidden and not name.startswith(SAMPLING)}
    metrics.record("policy/grad_norm_max", values["grad_norm"])
    metrics.update(shown, prefix="policy/", weight=values["tokens"])
    for count, names in TERMS.items():
        if own := values.get(count, 0.0):
            metrics.update({name: values[name] for name in names}, prefix="policy/", weight=own)
    if correction is not None and "weight_mean" in values:
        record_correction(metrics, values, correction)


def record_correction(metrics: StepMetrics, values: Mapping[str, float], correction: CorrectionSpec) -> None:
    """Record `correction/*` of the numbers of `LossStats.means` and `LossStats.correction_means`."""
    metrics.update(_named(values, CORRECTION), prefix="correction/", weight=values["tokens"])
    metrics.update(_named(values, CORRECTION_OF_SEQUENCES), prefix="correction/", weight=values["sequences"])
    for mask in correction.masks:
        names = {f"rejected_{mask.kind}": f"{mask.kind}/rejected_share", f"largest_{mask.kind}": f"{mask.kind}/largest"}
        metrics.update(_named(values, names), prefix="correction/", weight=values["tokens"])


def _named(values: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {metric: values[name] for name, metric in names.items()}


def record_mismatch(metrics: StepMetrics, values: Mapping[str, float]) -> None:
    """Record the comparison of the engine (old) with the trainer (new), by the names of `LossStats.means`."""
    shown = {metric: values[name] for name, metric in MISMATCH.items()}
    metrics.update(shown, prefix="mismatch/", weight=values["tokens"])


MOST_SHOWN = 32  # replicas of which each has metrics of its own in a step


def record_measures(metrics: StepMetrics, measured: StepMeasures) -> None:
    """Record the comparison of engine and trainer: of all tokens, by version lag and by replica."""
    assert measured.compared is not None  # the step makes an update
    record_mismatch(metrics, measured.compared)
    by_source = measured.by_source
    whole = by_source.whole
    if not whole.tokens:
        return
    metrics.record("mismatch/ratio_tail_share", whole.tail, weight=whole.tokens)
    for lag, gap in by_source.by_lag.items():
        values = {
            "tokens": gap.tokens,
            "logprob_abs_diff": gap.logprob_abs_diff,
            "k3_kl": gap.approx_kl,
            "ess": gap.ess,
        }
        metrics.update(values, prefix=f"mismatch/lag/{lag}/", weight=gap.tokens)
    for replica, by_lag in list(by_source.by_replica.items())[:MOST_SHOWN]:
        tokens = sum(gap.tokens for gap in by_lag.values())
        mean = sum(gap.tokens * gap.logprob_abs_diff for gap in by_lag.values()) / tokens
        values = {"tokens": tokens, "logprob_abs_diff": mean}
        metrics.update(values, prefix=f"mismatch/replica/{replica}/", weight=tokens)
