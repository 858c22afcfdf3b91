"""On-policy distillation in a step: the log-probs of teachers that the trainer holds, and advantages made of them.

Those of teachers with engines come with the rows. With `algorithm.distill.where: loss` the term `ref_kl` of the loss
uses them; its weights leave out the samples of data sets without a teacher.

Shapes: R response tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.common.trust.object_collectives import Codec, codec_of
from megarl.config.derived.logprob_passes import teacher_passes
from megarl.config.derived.teachers import teachers_by_set
from megarl.config.schema import Config
from megarl.queue.streams import ADVANTAGES, OLD_LOGPROBS, ROLLOUT_LOGPROBS, TEACHER_LOGPROBS
from megarl.queue.trajectory import SampleTag
from megarl.telemetry.metrics.registry import StepMetrics
from megarl.trainer import parallel
from megarl.trainer.batch import TrainSample
from megarl.trainer.policy import Policy

_SUMS: Codec[dict[str, tuple[float, int]]] = codec_of(dict[str, tuple[float, int]])


def add_teacher_logprobs(
    policy: Policy, tags: Mapping[str, SampleTag], samples: Mapping[str, TrainSample], config: Config
) -> None:
    """Give the samples of this replica the log-probs of their teachers, as far as rows have not brought them.

    Collective. `tags`: those of the samples of all replicas. With `where: loss` samples without a teacher get zeros, so
    that all have the stream that the loss needs. Raises ValueError if a row lacks the log-probs that the engines of its
    teacher have to bring.
    """
    for each in teacher_passes(config):
        if not any(tag.dataset in each.datasets for tag in tags.values()):
            continue
        mine = [sample for key, sample in samples.items() if tags[key].dataset in each.datasets]
        results = policy.compute_logprobs(mine, teacher=each.teacher)
        for sample, result in zip(mine, results, strict=True):
            sample.streams[TEACHER_LOGPROBS] = result.logprobs_R
    taught = teachers_by_set(config)
    for key, sample in samples.items():
        if TEACHER_LOGPROBS in sample.streams:
            continue
        if (teacher := taught.get(tags[key].dataset)) is not None and not tags[key].demonstrated:
            raise ValueError(f"sample {key} has no log-probs of teacher {teacher.name}, whose engines had to score it")
        if taught and config.algorithm.distill.where == "loss":
            sample.streams[TEACHER_LOGPROBS] = torch.zeros(len(sample.response_ids))


def distil(
    tags: Mapping[str, SampleTag], samples: Mapping[str, TrainSample], config: Config, metrics: StepMetrics
) -> None:
    """Make the advantages of samples with a teacher, and record the reverse KL to it. Collective.

    The estimate of a token is k1, log-prob of the policy that sampled it - log-prob of the teacher: with `where:
    advantage` its negative is the advantage (thinkingmachines.ai/blog/on-policy-distillation), which has no discount:
    each token answers for itself alone. Unless `rewards`, the advantages of the rewards are dropped.
    """
    taught = teachers_by_set(config)
    if not taught:
        return
    distill = config.algorithm.distill
    sums: dict[str, tuple[float, int]] = {}
    for key, sample in samples.items():
        dataset = tags[key].dataset
        if dataset not in taught or tags[key].demonstrated:
            continue
        old_R = sample.streams.get(OLD_LOGPROBS, sample.streams.get(ROLLOUT_LOGPROBS))
        assert old_R is not None  # `train_samples` sets one of them
        kl_R = old_R.float() - sample.streams[TEACHER_LOGPROBS].float()
        base_R = sample.streams[ADVANTAGES] if distill.rewards else torch.zeros_like(kl_R)
        sample.streams[ADVANTAGES] = base_R - distill.coef * kl_R if distill.where == "advantage" else base_R
        own_R = kl_R[sample.trained_mask].double()
        total, tokens = sums.get(dataset, (0.0, 0))
        sums[dataset] = (total + float(own_R.sum()), tokens + len(own_R))
    _record(metrics, sums)


def _record(metrics: StepMetrics, own: Mapping[str, tuple[float, int]]) -> None:
    everyone = parallel.dp_all_gather_object(dict(own), _SUMS)
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
