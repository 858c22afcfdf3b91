"""The samples of a step: made of the rows of its plan, then given the log-probs of teachers, and advantages.

On-policy distillation: rows bring the log-probs of teachers with engines; those of the trainer's teachers are computed
here. With `algorithm.distill.where: loss` the term `ref_kl` of the loss uses them; its weights leave out samples of
data sets without a teacher.

Shapes: R response tokens of one sample.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megarl.algorithms.filters import with_advantages
from megarl.algorithms.objective.objective import GlobalCounts, KLEstimator, kl_penalty
from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.common.values import by_sample
from megarl.config.checks.telemetry import SourceBuckets
from megarl.config.derived.algorithm import advantage_of
from megarl.config.derived.datasets import own_temperatures
from megarl.config.derived.logprob_passes import correction_of, recomputes_old_logprobs, teacher_passes
from megarl.config.derived.teachers import teachers_by_set
from megarl.config.derived.training_loss import default_weights
from megarl.config.schema import Config
from megarl.config.schema.algorithm import AlgorithmConfig, DistillConfig
from megarl.queue.streams import (
    ADVANTAGES,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    ROLLOUT_LOGPROBS,
    SOURCES,
    TEACHER_LOGPROBS,
)
from megarl.queue.trajectory import SampleTag, Trajectory
from megarl.run.step.off_policy import TokenOrigins
from megarl.run.step.plan import StepPlan
from megarl.telemetry.metrics.registry import StepMetrics
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy

_SUMS: Codec[dict[str, float]] = codec_of(dict[str, float])
_COUNTED: Codec[dict[str, tuple[float, int]]] = codec_of(dict[str, tuple[float, int]])


def train_samples(
    plan: StepPlan, rows: Mapping[str, Trajectory], config: Config, replica: int
) -> dict[str, TrainSample]:
    """Return a replica's samples by key, with the engine's log-probs: the old ones, unless the trainer's own are."""
    trained = {sample.key: sample.trained for group in plan.shaped.groups for sample in group}
    sources = TokenOrigins.of(plan.tags.values(), SourceBuckets.of(config))
    compares_all = recomputes_old_logprobs(config)
    # A mini-batch is compared with the weights after the updates before it, unless all are with those before the first.
    max_tokens = config.sampling.max_tokens
    made = [int(mini_batch_counts(plan, parts, max_tokens, None).tokens > 0) for parts in plan.mini_batches]
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


def mini_batch_counts(
    plan: StepPlan, mini_batch: Sequence[Sequence[str]], max_tokens: int, kept: Mapping[str, int] | None
) -> GlobalCounts:
    """Return the counts of the trained tokens of a mini-batch over all ranks.

    `kept`: the tokens that each sample trains, if masks have taken some out; None: those of the tags.
    """
    trained = {sample.key for group in plan.shaped.groups for sample in group if sample.trained}
    keys = [key for part in mini_batch for key in part if key in trained]
    lengths = [plan.tags[key].sampled_tokens if kept is None else kept[key] for key in keys]
    return GlobalCounts.of(lengths, max_tokens)


def set_advantages(
    plan: StepPlan,
    samples: Mapping[str, TrainSample],
    rows: Mapping[str, Trajectory],
    algorithm: AlgorithmConfig,
    metrics: StepMetrics,
) -> None:
    """Set each sample's advantages from shaped rewards; with `kl.where: reward`, subtract the sample's KL first."""
    groups = [by_sample(group) for group in plan.shaped.groups]
    kl = algorithm.kl
    if kl.coef > 0 and kl.where == "reward" and groups:
        penalty = _kl_of_all(samples, rows, kl.estimator)
        lowered = [
            [
                replace(row, reward=row.reward - kl.coef * sum(penalty[each.key] for each in rows))
                for rows in group
                for row in rows
            ]
            for group in groups
        ]
        groups = [by_sample(group) for group in with_advantages(lowered, advantage_of(algorithm))]
    rewards = [[rows[0].reward for rows in group] for group in groups]
    advantages = [[rows[0].advantage for rows in group] for group in groups]
    for row in (row for group in groups for rows_of_sample in group for row in rows_of_sample):
        if row.key not in samples:
            continue
        if row.turn_advantages:
            samples[row.key].set_turn_advantages(row.turn_advantages, row.turn_starts)
        else:
            samples[row.key].set_advantage(row.advantage)
    first = [group[0] for group in plan.shaped.groups]
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
        kl_R = kl_penalty(_policy_logprobs(sample), sample.streams[REFERENCE_LOGPROBS], estimator)
        sampled_R = torch.tensor(rows[key].response_mask, dtype=torch.bool)
        own[key] = float(kl_R[sampled_R].double().sum())
    return {key: value for part in parallel.dp_all_gather_object(own, _SUMS) for key, value in part.items()}


def _policy_logprobs(sample: TrainSample) -> Tensor:
    """Return the log-probs [R] of the policy that sampled: the trainer's own where it has computed them."""
    return sample.streams[OLD_LOGPROBS if OLD_LOGPROBS in sample.streams else ROLLOUT_LOGPROBS]


def add_teacher_logprobs(
    policy: Policy, tags: Mapping[str, SampleTag], samples: Mapping[str, TrainSample], config: Config
) -> None:
    """Give the samples of this replica the log-probs of their teachers that rows have not brought.

    Collective. `tags`: those of the samples of all replicas. With `where: loss` samples without a teacher get zeros, so
    that all have the stream that the loss needs. Raises ValueError if a row lacks the log-probs of a teacher with
    engines.
    """
    for each in teacher_passes(config):
        if not any(tag.dataset in each.datasets for tag in tags.values()):
            continue
        mine = [sample for key, sample in samples.items() if tags[key].dataset in each.datasets]
        for sample, logprobs_R in zip(mine, policy.compute_logprobs(mine, teacher=each.teacher), strict=True):
            sample.streams[TEACHER_LOGPROBS] = logprobs_R
    taught = teachers_by_set(config)
    for key, sample in samples.items():
        if TEACHER_LOGPROBS in sample.streams:
            continue
        if (teacher := taught.get(tags[key].dataset)) is not None and not tags[key].demonstrated:
            raise ValueError(f"sample {key} has no log-probs of teacher {teacher.name}, whose engines had to score it")
        if taught and config.algorithm.distill.where == "loss":
            sample.streams[TEACHER_LOGPROBS] = torch.zeros(len(sample.response_ids))


def distil(
    tags: Mapping[str, SampleTag],
    samples: Mapping[str, TrainSample],
    taught: Collection[str],
    distill: DistillConfig,
    metrics: StepMetrics,
) -> None:
    """Make the advantages of samples with a teacher, and record the reverse KL to it. Collective.

    `taught`: the data sets that have one.

    The estimate of a token is k1, log-prob of the policy that sampled it - log-prob of the teacher: with `where:
    advantage` its negative is the advantage (thinkingmachines.ai/blog/on-policy-distillation), which has no discount:
    each token answers for itself alone. Unless `rewards`, the advantages of the rewards are dropped.
    """
    if not taught:
        return
    sums: dict[str, tuple[float, int]] = {}
    for key, sample in samples.items():
        dataset = tags[key].dataset
        if dataset not in taught or tags[key].demonstrated:
            continue
        kl_R = _policy_logprobs(sample).float() - sample.streams[TEACHER_LOGPROBS].float()
        base_R = sample.streams[ADVANTAGES] if distill.rewards else torch.zeros_like(kl_R)
        sample.streams[ADVANTAGES] = base_R - distill.coef * kl_R if distill.where == "advantage" else base_R
        own_R = kl_R[sample.trained_mask].double()
        total, tokens = sums.get(dataset, (0.0, 0))
        sums[dataset] = (total + float(own_R.sum()), tokens + len(own_R))
    _record(metrics, sums)


def _record(metrics: StepMetrics, own: Mapping[str, tuple[float, int]]) -> None:
    everyone = parallel.dp_all_gather_object(dict(own), _COUNTED)
    together: dict[str, tuple[float, int]] = {}
    for part in everyone:
        for name, (total, tokens) in part.items():
            before = together.get(name, (0.0, 0))
            together[name] = (before[0] + total, before[1] + tokens)
    counted = {name: (total, tokens) for name, (total, tokens) in together.items() if tokens}
    if not counted:
        return
    tokens = sum(count for _, count in counted.values())
    metrics.record("policy/teacher_kl", sum(total for total, _ in counted.values()) / tokens)
    for name, (total, count) in counted.items():
        if name:
            metrics.record(f"data/{name}/teacher_kl", total / count)
