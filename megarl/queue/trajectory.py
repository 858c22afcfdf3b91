"""The trajectory: the only data that the rollout pool passes to the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
SampleStatus = Literal["ok", "failed"]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were produced by weights of `version`.

    `lost`: the number of the last updates of these weights that a resume has discarded, made in restart epoch `epoch`.
    Both are 0 for weights of the history that is trained.
    """

    version: int
    start: int
    end: int
    lost: int = 0
    epoch: int = 0

    @property
    def counts_as(self) -> int:
        """The version of the history that is as many updates away from any later one as these weights are.

        From weights with lost updates it is `lost` updates back to the history, and then forward from there. It may be
        negative.
        """
        return self.version - 2 * self.lost


@dataclass(frozen=True)
class Trajectory:
    """One prompt and the tokens that followed it. Token ids and per-token values are unpadded lists.

    Attributes:
        rollout_logprobs: the engine's *processed* log-probs (temperature applied), one per response token, EOS too.
        versions: the weight versions that produced the response, as consecutive spans of tokens.
        response_mask: 1 for tokens that the model sampled, 0 for tokens that were inserted (a tool's output). If it is
            omitted, all response tokens are sampled.
        status: `failed` marks a sample that is counted but must never be trained on; `failure` gives the reason.
        reward_error: why the reward function gave no reward; "" if it did. The sample has failed, or its reward is
            that of `reward.on_error`.
        streams: further values per response token (`megarl.queue.streams`).
        dataset: the name of the prompt's data set; "" if the run has only one.
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
    reward_error: str = ""
    response_mask: list[int] = field(default_factory=list)
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)
    dataset: str = ""

    def __post_init__(self) -> None:
        if not self.response_mask:
            object.__setattr__(self, "response_mask", [1] * len(self.response_ids))

    @property
    def key(self) -> str:
        """The key of the sample's row in the queue."""
        return sample_key(self.group_id, self.sample_index)

    @property
    def oldest_version(self) -> int:
        """The version that the oldest sampled token counts as and staleness is counted from; -1 if none was sampled."""
        return min((span.counts_as for span in self.versions), default=-1)

    @property
    def tag(self) -> SampleTag:
        """The summary of this trajectory that every rank reads."""
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
            dataset=self.dataset,
        )


@dataclass(frozen=True)
class SampleTag:
    """The summary of a sample that every rank reads for all samples of a batch: scalars, no tokens.

    `response_tokens` counts all tokens after the prompt, `sampled_tokens` those of them that the model sampled.
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
    dataset: str = ""

    @property
    def failed(self) -> bool:
        """True if the sample must never be trained on."""
        return self.status == "failed"

    @property
    def truncated(self) -> bool:
        """True if the response was cut at the token limit."""
        return self.finish_reason == "length"

    @property
    def total_tokens(self) -> int:
        """The number of prompt and response tokens."""
        return self.prompt_tokens + self.response_tokens


def sample_key(group_id: int, sample_index: int) -> str:
    """Return the key of a sample's row in the queue."""
    return f"{group_id}:{sample_index}"
