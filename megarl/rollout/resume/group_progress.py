"""The progress of a prompt group while it is generated, and the part of it that a resumed run can continue. Pure."""

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

# The records of an agent loop that a run which resumes continues from: its frozen state, and its calls of tools. Pure.
#
# A call has a number within its sample. Its intent is recorded before it is made and its answer after, so that a loop
# that is resumed makes no call twice that must not be repeated.

INTERRUPTED = "the call was interrupted, and it is unknown whether it has had an effect; it was not repeated"


@dataclass(frozen=True)
class CallRecord:
    """A call of a tool. `digest`: of the tool's name and the arguments; `text`: its answer, None while it is open.

    `seconds`: the time that it took.
    """

    digest: str
    text: str | None = None
    error: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class FrozenLoop:
    """The records of one sample's loop.

    `state`: what the loop has frozen last, a JSON text; "" if it has frozen nothing. `requests` and `begun_calls`: how
    many the loop had made then. `version` grows with every change. `calls`: by number.
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
        """Return the records with the intent or the answer of a call."""
        return changed(self, calls={**self.calls, number: call}, version=self.version + 1)

    def known(self, number: int, digest: str) -> CallRecord | None:
        """Return the call of that number, if it is the same one; None if it was never begun."""
        found = self.calls.get(number)
        return found if found is not None and found.digest == digest else None

    def encoded(self) -> bytes:
        """Return the records as a JSON text."""
        return msgspec.json.encode(self)  # of every loop at every change: `json` takes ten times as long

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> FrozenLoop:
        """Return the records with a content. Raises KeyError or TypeError for another one."""
        calls = {int(number): CallRecord(**call) for number, call in content["calls"].items()}
        return cls(**{**content, "calls": calls})


def call_digest(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a digest of a call, whatever the order of its arguments."""
    text = json.dumps([tool, arguments], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


RequestPlace = tuple[int, int]  # sample, turn: which request of a group it is, in every attempt


@dataclass(frozen=True)
class BegunResponse:
    """The tokens so far of one response, which may have ended, and a digest of its prompt."""

    prompt: str
    tokens: ResponsePart


@dataclass(frozen=True)
class UnfinishedGroup:
    """The progress of a group: the responses that have tokens, and the records of agent loops by sample."""

    responses: Mapping[RequestPlace, BegunResponse] = field(default_factory=dict)
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
    """The tokens of each request of a group, those included that an attempt before has made; the loops' records.

    `tokens`: by request id. Whoever generates continues what is there, and keeps it up to date (`ResponsesSoFar`).
    `loops`: by sample, of the loops that have frozen a state or called a tool; `record` changes them. `changed`: the
    samples of which that is so, until somebody who passes them on empties it. `written`: the size of what the journal
    has.
    """

    def __init__(self, prompt: PromptTask, kept: UnfinishedGroup | None = None) -> None:
        """`kept`: what `begun` returned in the attempt before, which the journal has."""
        self.prompt = prompt
        self.written = 0 if kept is None else kept.size
        self.tokens: dict[str, ResponsePart] = {}
        self._kept = dict(kept.responses) if kept is not None else {}
        self.loops: dict[int, FrozenLoop] = dict(kept.loops) if kept is not None else {}
        self.changed: set[int] = set()
        self._requests: dict[RequestPlace, _Request] = {}

    def begin(self, request: GenerateRequest, place: RequestPlace, prompt: str | None = None) -> None:
        """Record that a request is about to be made. What is kept of it is used if it has the same prompt.

        `prompt`: the digest of the prompt, if it is known.
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
        """Return the digest of a request's prompt. Raises KeyError for one that was not begun."""
        return self._requests[place].prompt

    def finished(self, place: RequestPlace) -> ResponsePart | None:
        """Return the response to a request of this attempt or the one before; None if it has not ended there."""
        if (request := self._requests.get(place)) is not None:
            tokens = self.tokens.get(request.name)
        else:
            kept = self._kept.get(place)
            tokens = kept.tokens if kept is not None else None
        return tokens if tokens is not None and tokens.finish_reason not in (None, "abort") else None

    def lengths(self) -> list[int]:
        """Return the response tokens so far of each sample that has made a request, those before a resume included."""
        lengths: dict[int, int] = {}
        for (sample, _), request in self._requests.items():
            tokens = self.tokens.get(request.name, ResponsePart())
            lengths[sample] = lengths.get(sample, 0) + len(tokens.response_ids)
        return list(lengths.values())

    def begun(self) -> UnfinishedGroup:
        """Return what can go on: the responses that have tokens, one that an engine has dropped too, and the loops."""
        begun = dict(self._kept)
        for place, request in self._requests.items():
            tokens = self.tokens.get(request.name, ResponsePart())
            if tokens.response_ids:
                dropped = tokens.finish_reason == "abort"
                begun[place] = BegunResponse(request.prompt, replace(tokens, finish_reason=None) if dropped else tokens)
        return UnfinishedGroup(begun, dict(self.loops))


def prompt_digest(prompt_ids: Sequence[int], images: Sequence[ImageRef] = ()) -> str:
    """Return a digest of a request's prompt."""
    shown = "".join(image.hash for image in images)
    return hashlib.blake2b(packed("q", prompt_ids) + shown.encode(), digest_size=16).hexdigest()
