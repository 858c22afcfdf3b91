"""One training step, from its plan to an updated policy, without any process besides the trainer's ranks.

`train_step` needs only a policy, the plan of `plan.py` and this rank's rows; the training loop and `megarl replay`
share it.

Shapes: `_R` the response tokens of one sample.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from megarl.algorithms.filters import with_advantages
from megarl.algorithms.objective.aggregation import GlobalCounts
from megarl.algorithms.objective.objective import KLEstimator, kl_penalty
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.common.values import by_sample
from megarl.config.derived.algorithm import advantage_of
from megarl.config.derived.datasets import own_temperatures
from megarl.config.derived.logprob_passes import (
    correction_of,
    interpolates_proximal,
    logprob_passes,
    recomputes_old_logprobs,
    teacher_passes,
)
from megarl.config.derived.training_loss import default_weights
from megarl.config.schema import Config
from megarl.queue.streams import (
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROLLOUT_LOGPROBS,
    SOURCES,
    TEACHER_LOGPROBS,
)
from megarl.queue.trajectory import Trajectory
from megarl.run.step.compare_logprobs import StepMeasures
from megarl.run.step.distill import add_teacher_logprobs, distil
from megarl.run.step.off_policy import reject_before_updates, set_interpolation
from megarl.run.step.plan import StepPlan, TrainedGroups, count_groups
from megarl.run.step.token_origin import TokenOrigins
from megarl.run.step.update_metrics import record_measures, record_update
from megarl.telemetry.metrics.registry import StepMetrics
from megarl.telemetry.metrics.timer import PhaseTimer
from megarl.telemetry.trace import events
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.packed_batch import PackedBatch, PackedStep
from megarl.trainer.policy import NonFiniteError, NoTokensError, Policy, StepRefused

_KEYS: Codec[list[str]] = codec_of(list[str])
_SUMS: Codec[dict[str, float]] = codec_of(dict[str, float])

# Is shown the plan of a step and what was measured, once a step, on every rank. It may raise StepRefused.
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
    packed: PackedStep | None = None,
    watch: StepWatch = lambda plan, measured: None,
) -> TrainedGroups:
    """Compute the log-probs that are missing, then make one optimizer update per mini-batch. Collective.

    `rows`: this DP rank's trajectories by key, at least those of `plan.keys_of(dp_rank)`. `step`: the number of steps
    before this one. `packed`: this rank's samples, packed on every rank; None: the step makes and packs them, with
    equal results. `watch` is called before the first update changes a weight.

    Records `policy/*`, `correction/*`, `mismatch/*` and `reward/shaped_mean`. A mini-batch without a weight in any term
    of the loss makes no update; a step whose groups are all filtered makes none, and records `policy/updates` 0.

    Returns the numbers of groups that the backward passes of the updates have gone through, on all replicas; those of a
    mini-batch that makes no update count as trained, because nothing of them is left to train. Raises CountersDiffer
    unless they are those of the plan, each sample once; NonFiniteError before any weight has changed, also if an engine
    has returned a log-prob that is not finite: its weights, or its arithmetic, may be damaged; and what `watch` raises.
    """
    _refuse_bad_logprobs(plan)
    recomputes = recomputes_old_logprobs(config)
    packed = packed or PackedStep(train_samples(plan, rows, config, parallel.dp_rank()))
    samples = packed.samples
    passes = logprob_passes(config) if plan.mini_batches else []
    with timer.phase("logprobs"):
        for stream in passes:
            _compute_logprobs(policy, packed, stream)
        used = {key: plan.tags[key] for part in plan.mini_batches for keys in part for key in keys}
        add_teacher_logprobs(policy, used, samples, config)
    if teacher_passes(config):
        passes = [*passes, TEACHER_LOGPROBS]
    if passes:
        _refuse_bad_passes(samples, passes)
    measured = StepMeasures.begin(plan.tags.values(), config)
    if recomputes and plan.mini_batches:
        measured.compare_in_pass(samples, rows)
    _set_advantages(plan, samples, rows, config, metrics)
    distil(plan.tags, samples, config, metrics)
    kept = reject_before_updates(samples, config, metrics) if plan.mini_batches else None
    parts, made = list(_mini_batches(plan, packed, config, kept)), 0
    updates = [part for part in parts if part.counts.tokens]
    done = [sample.key for part in parts if not part.counts.tokens for sample in part.samples]

    def check(values: Mapping[str, float]) -> None:
        measured.compare_in_update(values, None if recomputes else policy.source_gaps)
        record_measures(metrics, measured)
        watch(plan, measured)

    with timer.phase("update"):
        for number, (mine, counts, ready) in enumerate(updates):
            if interpolates_proximal(config):
                set_interpolation(mine, rows, version=plan.version, updates=made)
            update = partial(
                policy.update, mine, counts, packed=ready, another_follows=number + 1 < len(updates),
                measure_entropy=made == 0, check=_unchecked if made else check,
            )  # fmt: skip
            if (values := _make_update(update, mine, made, step)) is None:
                done += [sample.key for sample in mine]
                continue
            done += policy.trained_keys
            if made and not recomputes:
                measured.add_gaps(policy.source_gaps)
            made += 1
            record_update(metrics, values, config)
    if not made:
        watch(plan, measured)
    metrics.record("policy/updates", made)
    with timer.phase("update"):
        everyone = parallel.dp_all_gather_object(done, _KEYS) if plan.mini_batches else [done]
    return count_groups(plan, itertools.chain.from_iterable(everyone))


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


def _unchecked(values: Mapping[str, float]) -> None:
    """Accept an update after the first one of a step."""


def _refuse_bad_logprobs(plan: StepPlan) -> None:
    """Raise NonFiniteError, on every rank, if a sample of the batch has failed by its engine's log-probs."""
    bad = [key for key, tag in plan.tags.items() if tag.bad_logprobs]
    if bad:
        raise NonFiniteError(
            f"the log-probs that the engines returned are not finite in {len(bad)} of {len(plan.tags)} samples (the "
            f"first: sample {bad[0]}); no weight was changed"
        )


def _refuse_bad_passes(samples: Mapping[str, TrainSample], streams: Sequence[str]) -> None:
    """Raise NonFiniteError, on every rank, if a pass of the trainer has given a log-prob that is not finite.

    The loss would tell it too, but perhaps only after a first update of the step.
    """
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


class _MiniBatch(NamedTuple):
    """This rank's samples of a mini-batch, the counts of all ranks, and the samples packed, if they are.

    One whose samples are all masked, as truncated or by a correction, makes no update: its counts have no tokens.
    """

    samples: list[TrainSample]
    counts: GlobalCounts
    packed: PackedBatch | None


def _mini_batches(
    plan: StepPlan, packed: PackedStep, config: Config, kept: Mapping[str, int] | None
) -> Iterator[_MiniBatch]:
    """Yield the mini-batches of the step.

    `kept`: the tokens that each sample trains, if masks have taken some out since the samples were packed.
    """
    ready_made = packed.updates if kept is None else []
    ahead: list[PackedBatch | None] = [*ready_made] or [None] * len(plan.mini_batches)
    for mini_batch, ready in zip(plan.mini_batches, ahead, strict=True):
        samples = [packed.samples[key] for key in mini_batch[parallel.dp_rank()]]
        yield _MiniBatch(samples, _counts(plan, mini_batch, config.sampling.max_tokens, kept), ready)


def _compute_logprobs(policy: Policy, packed: PackedStep, stream: str) -> None:
    """Give every sample the log-probs `stream` by a pass. Collective."""
    samples = list(packed.samples.values())
    results = policy.compute_logprobs(samples, reference=stream == REFERENCE_LOGPROBS, packed=packed.whole)
    for sample, result in zip(samples, results, strict=True):
        sample.streams[stream] = result.logprobs_R


def train_samples(
    plan: StepPlan, rows: Mapping[str, Trajectory], config: Config, replica: int
) -> dict[str, TrainSample]:
    """Return a replica's samples by key, with the engine's log-probs: the old ones, unless the trainer's own are."""
    trained = {sample.key: sample.trained for group in plan.shaped.groups for sample in group}
    sources, compares_all = TokenOrigins.of(plan.tags.values(), config), recomputes_old_logprobs(config)
    # A mini-batch is compared with the weights after the updates before it, unless all are with those before the first.
    made = [int(_counts(plan, parts, config.sampling.max_tokens, None).tokens > 0) for parts in plan.mini_batches]
    before = itertools.accumulate(made, initial=0)
    update_of = {
        key: number for number, parts in zip(before, plan.mini_batches, strict=False) for key in parts[replica]
    }
    engine = ROLLOUT_LOGPROBS if correction_of(config) else OLD_LOGPROBS
    temperatures = own_temperatures(config)
    samples = {}
    keys = plan.keys_of(replica)
    versions = [plan.version + (0 if compares_all else update_of[key]) for key in keys]
    for key, sources_R in zip(keys, sources.of_rows([rows[key] for key in keys], versions), strict=True):
        row = rows[key]
        row = replace(row, streams={**row.streams, **default_weights(config, row)})
        samples[key] = TrainSample.of(row, trained=trained[key], temperature=temperatures.get(row.dataset))
        samples[key].streams[engine] = torch.tensor(row.rollout_logprobs, dtype=torch.float32)
        samples[key].streams[SOURCES] = sources_R
    return samples


def _set_advantages(
    plan: StepPlan,
    samples: Mapping[str, TrainSample],
    rows: Mapping[str, Trajectory],
    config: Config,
    metrics: StepMetrics,
) -> None:
    """Set each sample's advantages from shaped rewards; with `kl.where: reward`, subtract the sample's KL first."""
    groups = [by_sample(group) for group in plan.shaped.groups]
    kl = config.algorithm.kl
    if config.needs_reference and kl.where == "reward" and groups:
        penalty = _kl_of_all(samples, rows, kl.estimator)
        lowered = [
            [
                replace(row, reward=row.reward - kl.coef * sum(penalty[each.key] for each in rows))
                for rows in group
                for row in rows
            ]
            for group in groups
        ]
        groups = [by_sample(group) for group in with_advantages(lowered, advantage_of(config))]
    rewards = [[rows[0].reward for rows in group] for group in groups]
    advantages = [[rows[0].advantage for rows in group] for group in groups]
    for row in (row for group in groups for rows_of_sample in group for row in rows_of_sample):
        if row.key not in samples:
            continue
        if row.turn_advantages:
            samples[row.key].set_turn_advantages(row.turn_advantages, plan.tags[row.key].turn_starts)
        else:
            samples[row.key].set_advantage(row.advantage)
    first = [plan.tags[group[0].key] for group in plan.shaped.groups]
    new = [tag.group_id not in plan.reused and not tag.demonstrated for tag in first]
    if flat := [value for group in itertools.compress(rewards, new) for value in group]:
        metrics.record("reward/shaped_mean", sum(flat) / len(flat))
    judged = itertools.compress(advantages, [not tag.demonstrated for tag in first])
    if own := [value for group in judged for value in group]:
        spread = torch.tensor(own, dtype=torch.float64)
        metrics.record("policy/advantage_mean", float(spread.mean()))
        metrics.record("policy/advantage_std", float(spread.std(correction=0)))


def _kl_of_all(
    samples: Mapping[str, TrainSample], rows: Mapping[str, Trajectory], estimator: KLEstimator
) -> dict[str, float]:
    """Return the KL to the reference of every response of the step, summed over its sampled tokens, on every rank."""
    own = {}
    for key, sample in samples.items():
        old_R = sample.streams.get(OLD_LOGPROBS, sample.streams.get(ROLLOUT_LOGPROBS))
        assert old_R is not None  # train_samples sets one of them
        kl_R = kl_penalty(old_R, sample.streams[REFERENCE_LOGPROBS], estimator)
        sampled_R = torch.tensor(rows[key].response_mask, dtype=torch.bool)
        own[key] = float(kl_R[sampled_R].double().sum())
    return {key: value for part in parallel.dp_all_gather_object(own, _SUMS) for key, value in part.items()}


def _counts(
    plan: StepPlan, mini_batch: Sequence[Sequence[str]], max_tokens: int, kept: Mapping[str, int] | None
) -> GlobalCounts:
    trained = {sample.key for group in plan.shaped.groups for sample in group if sample.trained}
    keys = [key for part in mini_batch for key in part if key in trained]
    lengths = [plan.tags[key].sampled_tokens if kept is None else kept[key] for key in keys]
    return GlobalCounts.of(lengths, max_tokens)
