"""The progress of a prompt group during generation, and the part of it that a resumed run can continue. Pure.

A tool call has a number within its sample. Its intent is recorded before the call and its answer after it. So a resumed
loop repeats no call that must not be repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from megarl.common.values import changed, packed
from megarl.queue.images import ImageRef
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.tasks.prompts import PromptTask

INTERRUPTED = "the call was interrupted, and it is unknown whether it has had an effect; it was not repeated"


@dataclass(frozen=True)
class CallRecord:
    """A tool call. `digest`: of the tool's name and arguments; `text`: the answer, None while it is open."""

    digest: str
    text: str | None = None
    error: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class FrozenLoop:
    """The records of one sample's loop.

    `state`: the last frozen state as JSON, or "". `requests` and `begun_calls`: how many the loop had made by then.
    `version` grows with every change. `calls`: by number.
    """

    state: str = ""
    requests: int = 0
    begun_calls: int = 0
    version: int = 0
    calls: Mapping[int, CallRecord] = field(default_factory=dict)

    def freeze(self, state: str, requests: int, begun_calls: int) -> FrozenLoop:
        """Return the records with another state."""
        return changed(self, state=state, requests=requests, begun_calls=begun_calls, version=self.version + 1)

    def record(self, number: int, call: CallRecord) -> FrozenLoop:
        """Return the records with the intent or answer of a call."""
        return changed(self, calls={**self.calls, number: call}, version=self.version + 1)

    def known(self, number: int, digest: str) -> CallRecord | None:
        """Return the call of that number if it is the same call, else None."""
        found = self.calls.get(number)
        return found if found is not None and found.digest == digest else None

    def encoded(self) -> bytes:
        """Return the records as a JSON text."""
        return msgspec.json.encode(self)  # runs for every change of every loop; `json` takes ten times as long

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> FrozenLoop:
        """Return the records from decoded JSON. Raises KeyError or TypeError for other content."""
        calls = {int(number): CallRecord(**call) for number, call in content["calls"].items()}
        return cls(**{**content, "calls": calls})


def call_digest(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a digest of a call that ignores the order of its arguments."""
    text = json.dumps([tool, arguments], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


RequestPlace = tuple[int, int]  # sample, turn: identifies a request of a group in every attempt


@dataclass(frozen=True)
class PartialResponse:
    """A response's tokens so far (it may have ended), and a digest of its prompt."""

    prompt: str
    tokens: ResponsePart


@dataclass(frozen=True)
class UnfinishedGroup:
    """The progress of a group: responses with tokens, and the records of agent loops by sample."""

    responses: Mapping[RequestPlace, PartialResponse] = field(default_factory=dict)
    loops: Mapping[int, FrozenLoop] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """A number that grows with every token, every end of a response and every record of a loop."""
        parts = [each.tokens for each in self.responses.values()]
        tokens = sum(len(part.response_ids) + (part.finish_reason is not None) for part in parts)
        return tokens + sum(loop.version for loop in self.loops.values())


@dataclass(frozen=True)
class _Request:
    name: str  # its id
    prompt: str  # the digest of its prompt


class GroupProgress:
    """The tokens of a group's requests, including those of earlier attempts, and the records of its loops.

    `tokens`: by request id; generation continues and updates them (`ResponseCollector`). `loops`: by sample, of loops
    that have frozen a state or called a tool; `record` changes them. `changed`: samples with new records, until the
    reader empties it. `written`: the size that the journal has.
    """

    def __init__(self, prompt: PromptTask, kept: UnfinishedGroup | None = None) -> None:
        """`kept`: what `begun` returned in the last attempt, from the journal."""
        self.prompt = prompt
        self.written = 0 if kept is None else kept.size
        self.tokens: dict[str, ResponsePart] = {}
        self._kept = dict(kept.responses) if kept is not None else {}
        self.loops: dict[int, FrozenLoop] = dict(kept.loops) if kept is not None else {}
        self.changed: set[int] = set()
        self._requests: dict[RequestPlace, _Request] = {}

    def begin(self, request: GenerateRequest, place: RequestPlace, prompt: str | None = None) -> None:
        """Record that a request is about to be made; use its kept tokens if it has the same prompt.

        `prompt`: the digest of the prompt, if known.
        """
        if prompt is None:
            # What is kept lacks the experts of the same tokens as the request.
            known = [-request.routes_from] if request.routes_from else []
            prompt = prompt_digest(request.prompt_ids + known, request.images)
        self._requests[place] = _Request(request.request_id, prompt)
        kept = self._kept.pop(place, None)
        if kept is not None and kept.prompt == prompt:
            self.tokens[request.request_id] = kept.tokens

    def record(self, sample: int, loop: FrozenLoop) -> None:
        """Replace the records of a sample's loop."""
        self.loops[sample] = loop
        self.changed.add(sample)

    def prompt_of(self, place: RequestPlace) -> str:
        """Return the digest of a request's prompt. Raises KeyError before `begin`."""
        return self._requests[place].prompt

    def finished(self, place: RequestPlace) -> ResponsePart | None:
        """Return the response to a request of this or the last attempt; None if it has not ended."""
        if (request := self._requests.get(place)) is not None:
            tokens = self.tokens.get(request.name)
        else:
            kept = self._kept.get(place)
            tokens = kept.tokens if kept is not None else None
        return tokens if tokens is not None and tokens.finish_reason not in (None, "abort") else None

    def lengths(self) -> list[int]:
        """Return the response tokens so far of each sample with a request, including those before a resume."""
        lengths: dict[int, int] = {}
        for (sample, _), request in self._requests.items():
            tokens = self.tokens.get(request.name, ResponsePart())
            lengths[sample] = lengths.get(sample, 0) + len(tokens.response_ids)
        return list(lengths.values())

    def begun(self) -> UnfinishedGroup:
        """Return what can continue: responses with tokens, also if an engine dropped them, and the loops."""
        begun = dict(self._kept)
        for place, request in self._requests.items():
            tokens = self.tokens.get(request.name, ResponsePart())
            if tokens.response_ids:
                if tokens.finish_reason == "abort":
                    tokens = replace(tokens, finish_reason=None)
                begun[place] = PartialResponse(request.prompt, tokens)
        return UnfinishedGroup(begun, dict(self.loops))


def prompt_digest(prompt_ids: Sequence[int], images: Sequence[ImageRef] = ()) -> str:
    """Return a digest of a request's prompt."""
    shown = "".join(image.hash for image in images)
    return hashlib.blake2b(packed("q", prompt_ids) + shown.encode(), digest_size=16).hexdigest()
