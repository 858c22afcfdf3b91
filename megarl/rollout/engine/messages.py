"""Engine requests and their results: token ids, never text."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable
from dataclasses import dataclass

from megarl.config.schema import SamplingConfig
from megarl.config.schema.data import NO_REPETITION_PENALTY, NO_TOP_K, NO_TOP_P, EvalSamplingConfig
from megarl.queue.images import ImageRef
from megarl.queue.routes import Routes
from megarl.queue.trajectory import FinishReason, VersionSpan


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling parameters of one request, named as in vLLM. `temperature` 0 is greedy; `top_k` -1 is off.

    `ignore_eos`: only `stop_token_ids` end the response, not the EOS ids of the model's generation config.
    """

    max_tokens: int
    temperature: float
    stop_token_ids: tuple[int, ...]
    top_p: float = NO_TOP_P
    top_k: int = NO_TOP_K
    repetition_penalty: float = NO_REPETITION_PENALTY
    min_p: float = 0.0
    ignore_eos: bool = False

    @classmethod
    def training(cls, sampling: SamplingConfig, stop_token_ids: tuple[int, ...]) -> SamplingSpec:
        """Return the parameters of training samples."""
        return cls(sampling.max_tokens, sampling.temperature, stop_token_ids)

    @classmethod
    def greedy(cls, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingSpec:
        """Return the parameters of greedy evaluation responses."""
        return cls(max_tokens, 0.0, stop_token_ids)

    @classmethod
    def evaluation(cls, sampling: EvalSamplingConfig, max_tokens: int, stop_token_ids: tuple[int, ...]) -> SamplingSpec:
        """Return the parameters of sampled evaluation responses."""
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
    """A request for one response. `request_id` must be unique among the requests in flight.

    `priority`: an engine that schedules by priority takes lower numbers first; training has 0. `images`: the prompt's,
    in order; `files`: their files, or awaitables that return them in a replica. The fleet adds these; before that only
    tool images have files, and the others are empty. `routes_from`: the prompt's first token with unknown experts;
    None: nobody replays them.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingSpec
    seed: int | None = None
    priority: int = 0
    images: tuple[ImageRef, ...] = ()
    files: tuple[bytes | Awaitable[bytes], ...] = ()
    routes_from: int | None = None


def shared(file: bytes) -> bytes | Awaitable[bytes]:
    """Return a file as requests carry it: in Ray's object store if Ray runs, so each engine fetches it once."""
    import ray

    return ray.put(file) if ray.is_initialized() else file  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GenerateResult:
    """The response to one request, finished by replica `replica`.

    `logprobs` are processed (temperature applied), one float32 value per response token, EOS included. `seconds`: from
    the request's arrival at the replica to its last token. It includes `queue_s`, until an engine started on it, and
    `prefill_s`, from then to the first token. `lost_replicas`: how many replicas were lost during the response; the
    next one continued from the reported tokens. `cut`: it ended at its group's deadline. `failure`: why it was given
    up, or empty. `routes`: the experts of all prompt and response tokens but the last; None if not returned.
    """

    request_id: str
    response_ids: list[int]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica: int
    seconds: float = 0.0
    lost_replicas: int = 0
    cut: bool = False
    failure: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    routes: Routes | None = None


def request_seed(run_seed: int, group_id: int, sample_index: int, turn: int = 0) -> int:
    """Return the 63-bit seed of request `turn` of a sample.

    It depends only on these numbers, so it is the same on every machine and for a redrawn group.
    """
    return _seed_of(f"{run_seed}/{group_id}/{sample_index}" + (f"/{turn}" if turn else ""))


def continuation_seed(seed: int, position: int) -> int:
    """Return the 63-bit seed for the tokens from `position` (> 0) of a response whose request had `seed`."""
    return _seed_of(f"{seed}@{position}")


def _seed_of(place: str) -> int:
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
