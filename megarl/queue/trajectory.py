"""The trajectory: what the rollout pool writes and the trainer reads, and nothing else passes between them."""

from __future__ import annotations

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
    """One sampled response to one prompt. Token ids and log-probs are unpadded.

    `rollout_logprobs` are the engine's *processed* log-probs (temperature applied), one per response token,
    EOS included. `status == "failed"` marks a sample that may be counted but never trained on; `failure` says why.
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

    @property
    def key(self) -> str:
        return sample_key(self.group_id, self.sample_index)

    @property
    def oldest_version(self) -> int:
        """Staleness is judged from the oldest token."""
        return min(span.version for span in self.versions)


@dataclass(frozen=True)
class SampleTag:
    """What every rank knows of every sample of a batch: a few scalars, no tokens."""

    key: str
    group_id: int
    sample_index: int
    prompt_tokens: int
    response_tokens: int
    oldest_version: int
    finish_reason: FinishReason
    reward: float
    reward_components: dict[str, float]
    status: SampleStatus

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


def sample_key(group_id: int, sample_index: int) -> str:
    return f"{group_id}:{sample_index}"
