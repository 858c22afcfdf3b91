"""What goes into an engine and what comes out: token ids, never text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megarl.config.schema import EvalSamplingConfig, SamplingConfig
from megarl.queue.trajectory import FinishReason, VersionSpan


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling of one request; the names are vLLM's. `temperature` 0 is greedy."""

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0

    @classmethod
    def training(cls, sampling: SamplingConfig, stop_token_ids: tuple[int, ...]) -> SamplingSpec:
        return cls(sampling.max_tokens, sampling.temperature, stop_token_ids)

    @classmethod
    def greedy(cls, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingSpec:
        return cls(max_tokens, 0.0, stop_token_ids)

    @classmethod
    def evaluation(cls, sampling: EvalSamplingConfig, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingSpec:
        return cls(
            max_tokens,
            sampling.temperature,
            stop_token_ids,
            sampling.top_p,
            sampling.top_k,
            sampling.repetition_penalty,
        )


@dataclass(frozen=True)
class GenerateRequest:
    """One response to sample. `request_id` must be unique among the requests in flight."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingSpec
    seed: int | None = None


@dataclass(frozen=True)
class GenerateResult:
    """`logprobs` are processed (temperature applied), one float32 value per response token, EOS included.

    `seconds` from the request's arrival at the replica to its last token.
    """

    request_id: str
    response_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica: int
    seconds: float = 0.0


def request_seed(run_seed: int, group_id: int, sample_index: int) -> int:
    """63-bit seed of one sample: depends on these three only, so a redrawn group repeats. Stable across machines."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
