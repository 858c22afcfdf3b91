"""The trajectory: what the rollout pool writes and the trainer reads, and nothing else passes between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
SampleStatus = Literal["ok", "failed"]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were produced by weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Trajectory:
    """One prompt and what followed it. Token ids and per-token values are unpadded lists.

    `rollout_logprobs` are the engine's *processed* log-probs (temperature applied), one per response token,
    EOS included. `response_mask` is 1 for the tokens that the model sampled, and 0 for those that it was given in
    between (a tool's output); left out, all are sampled. `streams`: further values per response token
    (`megarl.queue.streams`). `status == "failed"` marks a sample that may be counted but never trained on; `failure`
    says why.
    """

    group_id: int
    sample_index: int  # 0..n-1 inside its prompt group
    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    reward: float
    reward_components: dict[str, float] = field(default_factory=dict)
    status: SampleStatus = "ok"
    failure: str = ""
    response_mask: list[int] = field(default_factory=list)
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.response_mask:
            object.__setattr__(self, "response_mask", [1] * len(self.response_ids))

    @property
    def key(self) -> str:
        return sample_key(self.group_id, self.sample_index)

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token, by which staleness is judged; -1 for a trajectory without one."""
        return min((span.version for span in self.versions), default=-1)

    @property
    def tag(self) -> SampleTag:
        """What every rank knows of it."""
        return SampleTag(
            key=self.key,
            group_id=self.group_id,
            sample_index=self.sample_index,
            prompt_tokens=len(self.prompt_ids),
            response_tokens=len(self.response_ids),
            sampled_tokens=sum(self.response_mask),
            oldest_version=self.oldest_version,
            finish_reason=self.finish_reason,
            reward=self.reward,
            reward_components=dict(self.reward_components),
            status=self.status,
        )


@dataclass(frozen=True)
class SampleTag:
    """What every rank knows of every sample of a batch: a few scalars, no tokens.

    `response_tokens` are all that followed the prompt, `sampled_tokens` those of them that the model sampled.
    """

    key: str
    group_id: int
    sample_index: int
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    oldest_version: int
    finish_reason: FinishReason
    reward: float
    reward_components: dict[str, float]
    status: SampleStatus

    @property
    def failed(self) -> bool:
        """Whether it must never be trained on."""
        return self.status == "failed"

    @property
    def truncated(self) -> bool:
        """Whether its response was cut at the token limit."""
        return self.finish_reason == "length"

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


def sample_key(group_id: int, sample_index: int) -> str:
    return f"{group_id}:{sample_index}"
