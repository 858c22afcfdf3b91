"""`POST /inference/v1/generate`: token ids in and out, in the form of vLLM 0.32. Pure: reads requests, builds answers.

Log-probs have the token both as vLLM's `token_id` and as `token: "token_id:N"`, for clients of OpenAI's form.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from megarl.gateway.request_fields import (
    ModelLimits,
    SamplingChoice,
    SamplingFields,
    check_tokens,
    read_fields,
    refused,
)
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.response_parts import ResponsePart

# vLLM's value for a missing log-prob. Do not train on such a token.
NO_LOGPROB = -9999.0
PRIORITY = "requests of the gateway rank like those of training; remove it"
# Fields without effect here.
_IGNORED = frozenset(("cache_salt", "token_offsets", "stream_options", "reasoning_ended", "reasoning_parser_kwargs"))


class TokenFields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a request."""

    token_ids: list[int] = []
    sampling_params: dict[str, Any] = {}
    request_id: str | None = None
    model: str = ""
    stream: bool = False
    return_token_ids: bool = False
    output_mode: str = "tokens"
    priority: int = 0


class TokenSampling(SamplingFields):
    """The sampling parameters of a request; `stop` strings are refused."""

    logprobs: Annotated[int, Meta(ge=0)] | None = None
    stop: str | list[str] = ""


def read_token_request(
    body: Mapping[str, Any], limits: ModelLimits, new_id: str
) -> tuple[TokenFields, TokenSampling, SamplingChoice]:
    """Read a request. `new_id`: its id if it names none. Raises ApiError naming the wrong field."""
    given = read_fields(body, TokenFields, ignored=_IGNORED)
    if not given.token_ids:
        raise refused("token_ids", "is empty or missing; give the token ids of the prompt")
    if given.stream:
        raise refused("stream", "this route answers as a whole; /v1/chat/completions streams")
    if given.output_mode != "tokens":
        raise refused("output_mode", "this route answers with token ids; /v1/chat/completions with text")
    if given.priority:
        raise refused("priority", PRIORITY)
    sampling = read_fields(given.sampling_params, TokenSampling, where="sampling_params")
    if sampling.stop:
        raise refused("sampling_params.stop", "needs text, and this route has none; use stop_token_ids")
    if (sampling.logprobs or 0) > 1:
        raise refused("sampling_params.logprobs", "the gateway returns the log-prob of the sampled token only; use 1")
    prompt_ids = check_tokens("token_ids", given.token_ids, limits)
    given.request_id = new_id if given.request_id is None else given.request_id
    return given, sampling, sampling.choice(limits, len(prompt_ids), "sampling_params")


def token_answer(
    request: TokenFields, model: str, parts: Sequence[ResponsePart], session: Mapping[str, Any], *, logprobs: bool
) -> dict[str, Any]:
    """Return the answer to a request whose responses have ended. `session`: its session fields."""
    return {
        "request_id": request.request_id,
        "model": model,
        "created": int(time.time()),
        "choices": [_choice(index, part, logprobs) for index, part in enumerate(parts)],
        "usage": usage_of(len(request.token_ids), parts),
        "prompt_token_ids": request.token_ids if request.return_token_ids else None,
        "session": session.get("session"),
    }


def _choice(index: int, part: ResponsePart, logprobs: bool) -> dict[str, Any]:
    more = {"stop_reason": None, "routed_experts": None, "sampling_mask": None}  # vLLM's fields
    content: list[dict[str, Any]] = [
        {"token_id": token, "token": f"token_id:{token}", "logprob": finite(value), "rank": None, "top_logprobs": []}
        for token, value in zip(part.response_ids, part.logprobs, strict=True)
    ]
    return {
        "index": index,
        "token_ids": part.response_ids,
        "logprobs": {"content": content} if logprobs else None,
        "finish_reason": part.finish_reason or "abort",
        "weight_versions": version_spans(part.versions),
        **more,
    }


def usage_of(prompt_tokens: int, parts: Sequence[ResponsePart]) -> dict[str, int]:
    """Return the numbers of tokens of a request."""
    made = sum(len(part.response_ids) for part in parts)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": made, "total_tokens": prompt_tokens + made}


def version_spans(versions: Sequence[VersionSpan]) -> list[dict[str, Any]]:
    """Return the spans of tokens [start, end) made by one weight version, which is text, as in vLLM.

    `replica`: the index of the replica, which vLLM lacks; left out if unknown.
    """
    return [
        {"version": str(each.version), "start": each.start, "end": each.end}
        | ({"replica": each.replica} if each.replica >= 0 else {})
        for each in versions
    ]


def finite(logprob: float) -> float:
    """Return a log-prob that JSON can represent, which has neither infinities nor NaN."""
    return logprob if math.isfinite(logprob) else NO_LOGPROB
