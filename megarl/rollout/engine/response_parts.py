"""The parts in which an engine reports a response, and how another engine continues one. Pure.

A lost engine's reported tokens are kept. Another engine gets the prompt plus these tokens and continues, so no reported
token is sampled twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeAlias

from megarl.common.values import changed
from megarl.queue.routes import Routes, joined
from megarl.queue.trajectory import FinishReason, VersionSpan
from megarl.rollout.engine.engine_load import EngineLoad
from megarl.rollout.engine.messages import GenerateRequest, continuation_seed


@dataclass(frozen=True)
class ResponsePart:
    """Consecutive tokens of one response, with one log-prob each; `versions` counts from the part's start.

    `finish_reason`: how the response ended with this part, `abort` if the engine dropped it; None if more tokens
    follow. `seconds`: from the request's arrival at the engine to the part's end. It includes `queue_s`, until the
    engine started on it, and `prefill_s`, from then to the first token. `routes`: the experts of each prompt and
    response token before the part's last, without those of earlier parts; None: the engine returns none.
    """

    response_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    seconds: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    routes: Routes | None = None

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.response_ids):
            raise ValueError(f"{len(self.logprobs)} log-probs for {len(self.response_ids)} tokens")

    def without_times(self, finish_reason: FinishReason | None) -> ResponsePart:
        """Return the tokens without the times, for a response its engine has stopped."""
        return changed(self, finish_reason=finish_reason, seconds=0.0, queue_s=0.0, prefill_s=0.0)


# An engine's answer to a call about some requests: each one's tokens since the last report, by request id; and the
# engine's load since its last report on any requests.
EngineReport: TypeAlias = tuple[dict[str, ResponsePart], EngineLoad]


def report_size(report: EngineReport) -> int:
    """Return roughly how many numbers a report has."""
    return 1 + sum(
        2 * len(part.response_ids) + (0 if part.routes is None else part.routes.experts_TLK.nbytes // 8)
        for part in report[0].values()
    )


def join_parts(first: ResponsePart, second: ResponsePart) -> ResponsePart:
    """Return the tokens of both, with adjacent spans of one version merged. Times and finish reason are the second's.

    Raises ValueError if the response ended with `first`.
    """
    if first.finish_reason is not None:
        raise ValueError(f"a response that has ended ({first.finish_reason}) cannot be continued")
    if not first.response_ids and len(second.versions) < 2:  # every response that arrives in one part
        return second
    offset = len(first.response_ids)
    spans = list(first.versions)
    for span in second.versions:
        moved = changed(span, start=span.start + offset, end=span.end + offset)
        if spans and spans[-1] == replace(moved, start=spans[-1].start, end=moved.start):
            moved = replace(moved, start=spans.pop().start)
        spans.append(moved)
    return ResponsePart(
        first.response_ids + second.response_ids,
        first.logprobs + second.logprobs,
        tuple(spans),
        second.finish_reason,
        second.seconds,
        second.queue_s,
        second.prefill_s,
        joined(first.routes, second.routes),
    )


def tokens_from(part: ResponsePart, known: int) -> ResponsePart:
    """Return a part's tokens from index `known` on; `join_parts` is the inverse."""
    if not known:
        return part
    spans = tuple(
        replace(span, start=max(span.start - known, 0), end=span.end - known)
        for span in part.versions
        if span.end > known
    )
    ids, logprobs = part.response_ids[known:], part.logprobs[known:]
    routes = None if part.routes is None else part.routes.of(len(part.routes) - len(ids))
    return replace(part, response_ids=ids, logprobs=logprobs, versions=spans, routes=routes)


def first_tokens(part: ResponsePart, count: int, finish_reason: FinishReason) -> ResponsePart:
    """Return the first `count` tokens of a part; they end the response with `finish_reason`."""
    spans = tuple(replace(span, end=min(span.end, count)) for span in part.versions if span.start < count)
    return replace(
        part, response_ids=part.response_ids[:count], logprobs=part.logprobs[:count], versions=spans,
        finish_reason=finish_reason,
        routes=None if part.routes is None else part.routes.of(0, len(part.routes) - len(part.response_ids[count:])),
    )  # fmt: skip


def tokens_end(request: GenerateRequest, so_far: ResponsePart) -> FinishReason | None:
    """Return how the tokens so far end the response; None if more can follow.

    Used for tokens from elsewhere: an engine reports the end with the last token.
    """
    ids = so_far.response_ids
    if ids and ids[-1] in request.sampling.stop_token_ids:
        return "stop"
    return "length" if len(ids) >= request.sampling.max_tokens else None


def continue_request(request: GenerateRequest, so_far: ResponsePart) -> GenerateRequest:
    """Return the request for the tokens after `so_far`; `request` itself if that is empty.

    Its seed depends on the request's seed and the number of tokens so far. Raises ValueError if no token can follow.
    """
    if (end := tokens_end(request, so_far)) is not None:
        raise ValueError(f"the tokens of request {request.request_id} end the response ({end})")
    position = len(so_far.response_ids)
    if not position:
        return request
    return replace(
        request,
        prompt_ids=request.prompt_ids + so_far.response_ids,
        sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - position),
        seed=None if request.seed is None else continuation_seed(request.seed, position),
        routes_from=None if request.routes_from is None else request.routes_from + len(so_far.routes or ()),
    )
