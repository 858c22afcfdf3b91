"""The trajectory: what the rollout pool generates for the trainer, with its tag in the queue."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megarl.common.values import packed
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes

FinishReason = Literal["stop", "length", "abort"]
SampleStatus = Literal["ok", "failed"]

# vLLM's value for a NaN or missing log-prob. Never average it.
MISSING_LOGPROB = -9999.0

# The columns of a trajectory, and how `array` writes them.
COLUMN_CODES = {"prompt_ids": "i", "response_ids": "i", "rollout_logprobs": "f", "response_mask": "b"}


def first_bad_logprob(logprobs: Sequence[float]) -> int | None:
    """Return the position of the first non-finite or missing log-prob; None if all are valid."""
    # The sum is not finite if any value is not. A loop in Python takes several times as long.
    if math.isfinite(sum(logprobs)) and min(logprobs, default=0.0) > MISSING_LOGPROB:
        return None
    bad = (not math.isfinite(value) or value <= MISSING_LOGPROB for value in logprobs)
    return next((position for position, is_bad in enumerate(bad) if is_bad), None)


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens [start, end) were produced by weights of `version`.

    `lost`: how many of these weights' last updates a resume has discarded, made in restart epoch `epoch`; both are 0
    for weights of the committed history. `replica`: index of the engine's replica; -1 if unknown.
    """

    version: int
    start: int
    end: int
    lost: int = 0
    epoch: int = 0
    replica: int = -1

    @property
    def counts_as(self) -> int:
        """The version of the committed history at the same distance, in updates, from any later one.

        From weights with lost updates it is `lost` updates back to the history, then forward. May be negative.
        """
        return self.version - 2 * self.lost


@dataclass(frozen=True)
class Trajectory:
    """One prompt and the tokens that followed it. Token ids and per-token values are unpadded lists.

    Attributes:
        rollout_logprobs: the engine's *processed* log-probs (temperature applied), one per response token, with EOS.
        versions: the weight versions that produced the response, as consecutive spans of tokens.
        response_mask: 1 for tokens that the model sampled, 0 for inserted tokens (a tool's output). Default: all 1.
        status: `failed` marks a sample that is counted but must never be trained on; `failure` gives the reason.
        reward_error: why the reward function returned no reward; "" if it did. Then the sample has failed, or its
            reward is that of `reward.on_error`.
        streams: further values per response token (`megarl.queue.streams`).
        dataset: the name of the prompt's data set; "" if the run has only one.
        part: which trajectory of its sample this is. An agent may return several per sample, with equal rewards.
        turn_rewards: rewards of the model's turns in addition to `reward`, in order; empty for none. `turn_starts`: the
            first response token of each of these turns.
        images: the images of the sequence, by offset; empty for none.
        files: the image files that the prompt lacks, by hash; not part of the row.
        routes: the experts of the tokens of prompt and response except the last; None: no engine returned any.
        demonstrated: the response comes from the data, not from a model: it has neither versions nor a reward, its
            log-probs are 0, and only the loss term `ce` trains it.
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
    part: int = 0
    demonstrated: bool = False
    turn_rewards: list[float] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    images: tuple[ImageRef, ...] = ()
    routes: Routes | None = None
    files: Mapping[str, bytes] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.response_mask:
            object.__setattr__(self, "response_mask", [1] * len(self.response_ids))

    @property
    def key(self) -> str:
        """The key of this trajectory's row in the queue."""
        return sample_key(self.group_id, self.sample_index, self.part)

    @property
    def oldest_version(self) -> int:
        """The `counts_as` of the oldest sampled token, from which staleness is counted; -1 if none was sampled."""
        return min((span.counts_as for span in self.versions), default=-1)

    @cached_property
    def columns(self) -> dict[str, bytes]:
        """Tokens and per-token values as bytes, by field name, for the queue and the journal.

        Token ids are int32, log-probs float32, the mask int8, in native byte order.
        """
        return {name: packed(code, getattr(self, name)) for name, code in COLUMN_CODES.items()}

    @cached_property
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
            bad_logprobs=self.has_bad_logprobs,
            part=self.part,
            replicas=sorted({span.replica for span in self.versions if span.replica >= 0}),
            version_tokens=self._version_tokens(),
            demonstrated=self.demonstrated,
            turn_rewards=list(self.turn_rewards),
            turn_starts=list(self.turn_starts),
        )

    def _version_tokens(self) -> dict[str, int]:
        """Return the number of sampled tokens by version (`counts_as`)."""
        counts: dict[str, int] = {}
        for span in self.versions:
            name = str(span.counts_as)
            counts[name] = counts.get(name, 0) + sum(self.response_mask[span.start : span.end])
        return counts

    @property
    def has_bad_logprobs(self) -> bool:
        """True for a failed sample whose engine returned non-finite log-probs. It keeps its tokens."""
        return self.status == "failed" and first_bad_logprob(self.rollout_logprobs) is not None


@dataclass(frozen=True)
class SampleTag:
    """The summary of a trajectory that every rank reads for all samples of a batch: scalars, no tokens.

    `response_tokens` counts all tokens after the prompt, `sampled_tokens` those that the model sampled. `bad_logprobs`:
    as `Trajectory.has_bad_logprobs`. `replicas`: sorted indices of the known replicas that sampled tokens of it.
    `version_tokens`: the number of sampled tokens by version (`VersionSpan.counts_as`), as text. The other fields are
    as in `Trajectory`; a demonstrated sample is never stale.

    The plan of a step has copies with shaped rewards and the last three fields. With `trained` False the tokens are
    masked from the loss. `turn_advantages`: one for each turn of the row, or none; if there are any, `advantage` is the
    mean over the sample's turns.
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
    bad_logprobs: bool = False
    part: int = 0
    replicas: list[int] = field(default_factory=list)
    version_tokens: dict[str, int] = field(default_factory=dict)
    demonstrated: bool = False
    turn_rewards: list[float] = field(default_factory=list)
    turn_starts: list[int] = field(default_factory=list)
    trained: bool = True
    advantage: float = 0.0
    turn_advantages: list[float] = field(default_factory=list)

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


def sample_key(group_id: int, sample_index: int, part: int = 0) -> str:
    """Return the key of a row in the queue: `group:sample`, or `group:sample.part` for later parts of a sample."""
    return f"{group_id}:{sample_index}.{part}" if part else f"{group_id}:{sample_index}"


def key_order(key: str) -> tuple[int, int, int]:
    """Return (group, sample, part) of a key."""
    group, _, sample = key.partition(":")
    index, _, part = sample.partition(".")
    return int(group), int(index), int(part or 0)
