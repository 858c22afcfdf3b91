"""The groups of one step of a tiny model: samples, rewards, and what a step makes of them, written out."""

import statistics
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from megarl.queue.trajectory import Trajectory, VersionSpan, sample_key
from megarl.trainer.batch import TrainSample
from tests.support.losses.rl_problem import dense_dims, make_samples, plain_logprobs
from tests.support.losses.samples import with_streams
from tests.support.models.tiny import make_tiny_model

GROUPS, PER_GROUP = 4, 3
REWARDS = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.5, 1.0]]


def make_step_problem(folder: Path) -> tuple[Path, dict[str, TrainSample]]:
    """A tiny model and samples of four groups, whose reference log-probs are the model's own."""
    model_dir = make_tiny_model(folder / "model", **dense_dims())
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    samples = make_samples(model_dir, count=GROUPS * PER_GROUP)
    with torch.no_grad():
        own = [plain_logprobs(model, sample)[0] for sample in samples]
    keys = [sample_key(*divmod(number, PER_GROUP)) for number in range(len(samples))]
    return model_dir, {
        key: with_streams(replace(sample, key=key, loss_mask_R=None), reference_logprobs=reference)
        for key, sample, reference in zip(keys, samples, own, strict=True)
    }


def trajectory(sample: TrainSample) -> Trajectory:
    """The last sample of each group is truncated."""
    group, index = (int(part) for part in sample.key.split(":"))
    return Trajectory(
        group_id=group,
        sample_index=index,
        prompt_ids=sample.prompt_ids,
        response_ids=sample.response_ids,
        rollout_logprobs=sample.streams["old_logprobs"].tolist(),
        versions=(VersionSpan(0, 0, len(sample.response_ids)),),
        finish_reason="length" if index == PER_GROUP - 1 else "stop",
        reward=REWARDS[group][index],
    )


def by_group(values: list[float], kind: str) -> list[float]:
    """Advantages of one group, written out."""
    others = [(sum(values) - value) / (len(values) - 1) for value in values]
    mean, deviation = statistics.fmean(values), statistics.stdev(values) + 1e-4
    return {
        "grpo": [(value - mean) / deviation for value in values],
        "dr_grpo": [value - mean for value in values],
        "rloo": [value - other for value, other in zip(values, others, strict=True)],
    }[kind]


def resampled(sample: TrainSample) -> TrainSample:
    """The sample as a correction sees it: sampled by what is otherwise its old policy."""
    own, sampling = sample.streams["reference_logprobs"], sample.streams["old_logprobs"]
    return with_streams(sample, old_logprobs=own, rollout_logprobs=sampling)
