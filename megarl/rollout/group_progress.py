"""The responses of a prompt group while they are being generated: what a run that resumes can continue. Pure."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.rollout.requests import GenerateRequest
from megarl.rollout.response_parts import ResponsePart

RequestPlace = tuple[int, int]  # sample, turn: which request of a group it is, in every attempt


@dataclass(frozen=True)
class BegunResponse:
    """The tokens so far of one response, which may have ended, and a digest of its prompt."""

    prompt: str
    tokens: ResponsePart


@dataclass(frozen=True)
class _Request:
    place: RequestPlace
    prompt: str


class GroupProgress:
    """The tokens of each request of a group, those included that an attempt before has made.

    `tokens`: by request id. Whoever generates continues what is there, and keeps it up to date (`ResponsesSoFar`).
    """

    def __init__(
        self, prompt_ids: Sequence[int], dataset: str, kept: Mapping[RequestPlace, BegunResponse] | None = None
    ) -> None:
        """`prompt_ids` and `dataset` are those of the group; `kept` is what `begun` returned in the attempt before."""
        self.prompt_ids, self.dataset = prompt_ids, dataset
        self.tokens: dict[str, ResponsePart] = {}
        self._kept = dict(kept or {})
        self._requests: dict[str, _Request] = {}

    def begin(self, request: GenerateRequest, place: RequestPlace) -> None:
        """Record that a request is about to be made. What is kept of it is used if it has the same prompt."""
        prompt = prompt_digest(request.prompt_ids)
        self._requests[request.request_id] = _Request(place, prompt)
        kept = self._kept.pop(place, None)
        if kept is not None and kept.prompt == prompt:
            self.tokens[request.request_id] = kept.tokens

    def begun(self) -> dict[RequestPlace, BegunResponse]:
        """Return the responses that have tokens; one that an engine has dropped can go on."""
        begun = dict(self._kept)
        for name, request in self._requests.items():
            tokens = self.tokens.get(name, ResponsePart())
            if tokens.response_ids:
                dropped = tokens.finish_reason == "abort"
                begun[request.place] = BegunResponse(
                    request.prompt, replace(tokens, finish_reason=None) if dropped else tokens
                )
        return begun


def size(begun: Mapping[RequestPlace, BegunResponse]) -> int:
    """Return a number that grows with every token and every end of these responses."""
    parts = [each.tokens for each in begun.values()]
    return sum(len(part.response_ids) + (part.finish_reason is not None) for part in parts)


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """Return a digest of a request's prompt."""
    return hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=16).hexdigest()
