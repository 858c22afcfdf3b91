"""Samples as the trainer sees them, and tags as every rank sees them, from the few values a test cares about."""

import torch
from torch import Tensor

from megarl.queue.trajectory import SampleTag, Trajectory, VersionSpan
from megarl.trainer.batch import TrainSample


def train_sample(
    key: str,
    prompt_ids: list[int],
    response_ids: list[int],
    advantage: float = 0.0,
    *,
    loss_mask: Tensor | None = None,
    **streams: Tensor,
) -> TrainSample:
    """A sample with one advantage for all its tokens, and further streams by name."""
    sample = TrainSample(key, prompt_ids, response_ids, loss_mask, streams)
    sample.set_advantage(advantage)
    return sample


def advantage_of(sample: TrainSample) -> float:
    """The advantage of a sample's tokens, which must be one value."""
    values = set(sample.streams["advantages"].tolist())
    assert len(values) == 1, values
    return values.pop()


def trajectory_of(response_ids: list[int], *, response_mask: list[int], **streams: list[float]) -> Trajectory:
    """Sample 0:0, with streams by name."""
    return Trajectory(
        group_id=0,
        sample_index=0,
        prompt_ids=[1],
        response_ids=response_ids,
        rollout_logprobs=[-1.0] * len(response_ids),
        versions=(VersionSpan(0, 0, len(response_ids)),),
        finish_reason="stop",
        reward=0.0,
        response_mask=response_mask,
        streams=streams,
    )


def judged(
    key: str, reward: float, response_tokens: int = 5, *, truncated: bool = False, failed: bool = False
) -> SampleTag:
    """The tag of sample `GROUP:INDEX` (a group may be named by a letter)."""
    group, index = key.split(":")
    number = int(group) if group.isdecimal() else ord(group)
    return SampleTag(
        key=key,
        group_id=number,
        sample_index=int(index),
        prompt_tokens=3,
        response_tokens=response_tokens,
        sampled_tokens=response_tokens,
        oldest_version=0,
        finish_reason="length" if truncated else "stop",
        reward=reward,
        reward_components={},
        status="failed" if failed else "ok",
    )


def without_stream(sample: TrainSample, name: str) -> TrainSample:
    """A copy that lacks a stream."""
    streams = {key: value for key, value in sample.streams.items() if key != name}
    return TrainSample(sample.key, sample.prompt_ids, sample.response_ids, sample.loss_mask_R, streams)


def with_streams(sample: TrainSample, **streams: Tensor) -> TrainSample:
    """A copy with streams added or replaced."""
    return TrainSample(
        sample.key, sample.prompt_ids, sample.response_ids, sample.loss_mask_R, {**sample.streams, **streams}
    )


def full(sample: TrainSample, value: float) -> Tensor:
    """One value for each response token."""
    return torch.full((len(sample.response_ids),), value)
