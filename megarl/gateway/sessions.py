"""The sessions of the gateway: the exact tokens sampled in each turn. Pure: the caller passes the time.

A session is a tree of turns: a turn continues the tokens of another one, or begins with its own prompt. Each turn keeps
only the prompt tokens after its parent's, and the texts of those messages, so a dialogue stores each token and text
once. Nothing of a used session is dropped: without room, new turns are refused, because a dialogue with forgotten turns
would continue from tokens that were not sampled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megarl.gateway.request_fields import RUN_SESSIONS, ApiError, SessionTerms, no_session, too_many
from megarl.gateway.token_route import finite, version_spans
from megarl.queue.images import ImageRef
from megarl.queue.trajectory import FinishReason, VersionSpan
from megarl.rollout.engine.response_parts import ResponsePart

# A key identifies the beginning of a conversation: all messages up to one, and whatever else the prompt depends on. It
# finds a recorded turn again. Clients return the model's turns in slightly other forms: without nulls, with rewritten
# arguments of tool calls, without outer white space. These forms have the same key.

ChatMessage = Mapping[str, Any]
ShownImage = tuple[ImageRef, bytes]  # an image of a prompt, and its file

MOST_SESSIONS, MOST_TOKENS = 100_000, 100_000_000  # of a gateway
TOKEN_BYTES = 12
# Fields of a message that the prompt depends on. Clients add others, such as `refusal` and `annotations`.
_FIELDS = ("role", "content", "name", "tool_call_id", "reasoning_content")


def root_key(*parts: object) -> str:
    """Return the key of an empty conversation. `parts`: whatever else its prompt depends on, as JSON."""
    return _digest("", parts)


def extended(key: str, message: ChatMessage) -> str:
    """Return the key of the conversation `key` followed by `message`."""
    return _digest(key, _canonical(message))


def keys_of(root: str, messages: Sequence[ChatMessage]) -> list[str]:
    """Return the keys of all beginnings: of no message, the first one, the first two, and so on."""
    keys = [root]
    for message in messages:
        keys.append(extended(keys[-1], message))
    return keys


def _canonical(message: ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {name: message[name] for name in _FIELDS if message.get(name)}
    if isinstance(found.get("content"), str):
        found["content"] = found["content"].strip()
    if not found.get("content"):
        found.pop("content", None)
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # keep the text if it is not JSON
            arguments = json.loads(arguments)
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _digest(before: str, value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(f"{before}\n{text}".encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RecordedTurn:
    """One response of a session. `added_ids`: its prompt, without the tokens of the turn `parent` that it continues.

    `replica`: has its tokens in its KV cache. For functions that use the whole dialogue, chats also have role and text
    of the `messages` after the parent, and the `calls` of the response, as `Turn.calls`. `shown`: the images among
    `added_ids`, by their places in the whole prompt.
    """

    number: int
    parent: int | None
    request_id: str
    added_ids: array[int]
    response_ids: array[int]
    logprobs: array[float]
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica: int
    messages: tuple[tuple[str, str], ...] = ()
    calls: tuple[dict[str, Any], ...] = ()
    shown: tuple[ShownImage, ...] = ()

    @property
    def tokens(self) -> int:
        """The number of tokens it keeps; image files count as tokens of `TOKEN_BYTES` bytes."""
        files = sum(len(file) for _, file in self.shown) // TOKEN_BYTES
        return len(self.added_ids) + len(self.response_ids) + files


class GatewaySession:
    """The turns of one session. `used_at`: when it was last used; `open_requests`: how many are running.

    `terms`: fixed for its requests; None if a client began it by using it. `refused`: the error code of a request
    refused at a bound of the trajectory; "" if none was, or if a turn has followed.
    """

    def __init__(self, name: str, now: float, terms: SessionTerms | None = None) -> None:
        self.name, self.used_at, self.terms, self.open_requests = name, now, terms, 0
        self.asked = 0  # requests so far
        self.refused = ""
        self.turns: list[RecordedTurn] = []
        self._children: dict[int | None, list[int]] = {}
        self._by_key: dict[str, int] = {}

    @property
    def tokens(self) -> int:
        """The number of tokens it keeps."""
        return sum(turn.tokens for turn in self.turns)

    def ids_through(self, number: int | None) -> list[int]:
        """Return all tokens of a turn's prompt and response; none for None."""
        chain: list[RecordedTurn] = []
        while number is not None:
            chain.append(self.turns[number])
            number = chain[-1].parent
        ids: list[int] = []
        for turn in reversed(chain):
            ids += turn.added_ids
            ids += turn.response_ids
        return ids

    def shown_through(self, number: int | None) -> tuple[ShownImage, ...]:
        """Return all images of a turn's prompt; none for None."""
        shown: tuple[ShownImage, ...] = ()
        while number is not None:
            turn = self.turns[number]
            shown, number = turn.shown + shown, turn.parent
        return shown

    def prompt_of(self, number: int) -> list[int]:
        """Return the whole prompt of a turn."""
        turn = self.turns[number]
        return self.ids_through(turn.parent) + turn.added_ids.tolist()

    def by_key(self, key: str) -> RecordedTurn | None:
        """Return the last turn that ended the conversation of this key."""
        found = self._by_key.get(key)
        return None if found is None else self.turns[found]

    def continued_by(self, prompt_ids: Sequence[int]) -> RecordedTurn | None:
        """Return the turn whose prompt and response form the longest beginning of a prompt."""
        prompt = array("i", prompt_ids)
        best: tuple[int, int] | None = None
        ahead = [(number, 0) for number in self._children.get(None, ())]
        while ahead:
            number, start = ahead.pop()
            turn = self.turns[number]
            middle = start + len(turn.added_ids)
            end = middle + len(turn.response_ids)
            if prompt[start:middle] != turn.added_ids or prompt[middle:end] != turn.response_ids:
                continue
            best = max(best or (end, number), (end, number))
            ahead += [(child, end) for child in self._children.get(number, ())]
        return None if best is None else self.turns[best[1]]

    def record(
        self, prompt_ids: Sequence[int], part: ResponsePart, *, parent: int | None = None, request_id: str = "",
        replica: int = -1, key: str = "", messages: tuple[tuple[str, str], ...] = (),
        calls: tuple[dict[str, Any], ...] = (), shown: tuple[ShownImage, ...] = (),
    ) -> RecordedTurn:  # fmt: skip
        """Add a turn. `key`: of the conversation that it ends, for a chat.

        Raises ValueError if its prompt does not begin with the tokens of `parent`, or if the response has not ended.
        """
        before = self.ids_through(parent)
        if list(prompt_ids[: len(before)]) != before:
            raise ValueError(f"the prompt does not begin with the tokens of turn {parent}")
        if part.finish_reason is None:
            raise ValueError("the response has not ended")
        turn = RecordedTurn(
            number=len(self.turns),
            parent=parent,
            request_id=request_id,
            added_ids=array("i", prompt_ids[len(before) :]),
            response_ids=array("i", part.response_ids),
            logprobs=array("d", part.logprobs),
            versions=part.versions,
            finish_reason=part.finish_reason,
            replica=replica,
            messages=messages,
            calls=calls,
            shown=shown,
        )
        self.turns.append(turn)
        self.refused = ""
        self._children.setdefault(parent, []).append(turn.number)
        if key:
            self._by_key[key] = turn.number
        return turn


def session_content(session: GatewaySession) -> dict[str, Any]:
    """Return the answer to `GET /v1/sessions/ID`: every turn with its exact tokens."""
    turns = [
        {
            "number": turn.number,
            "parent": turn.parent,
            "request_id": turn.request_id,
            "prompt_ids": session.prompt_of(turn.number),
            "response_ids": turn.response_ids.tolist(),
            "logprobs": [finite(value) for value in turn.logprobs],
            "weight_versions": version_spans(turn.versions),
            "finish_reason": turn.finish_reason,
            "messages": turn.messages,
            "calls": turn.calls,
            "images": [{**vars(image), "file": file} for image, file in turn.shown],
        }
        for turn in session.turns
    ]
    return {"id": session.name, "refused": session.refused or None, "turns": turns}


class Sessions:
    """All sessions: up to `most` at once, with up to `most_tokens` in all; unused ones expire after `idle_s`."""

    def __init__(self, most: int, most_tokens: int, idle_s: float) -> None:
        self._most, self._most_tokens, self._idle_s = most, most_tokens, idle_s
        self._sessions: dict[str, GatewaySession] = {}  # the most recently used at the end
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, name: str) -> GatewaySession:
        """Return a session. Raises ApiError if there is none."""
        if name not in self._sessions:
            raise no_session()
        return self._sessions[name]

    def open(self, name: str, terms: SessionTerms, now: float) -> None:
        """Begin a session that fixes `terms` for its requests. Raises ApiError if it exists, and as `using`."""
        if name in self._sessions:
            reason = f"session {name!r} already exists; open each session once, under a unique name"
            raise ApiError(409, reason, code="session_exists")
        if terms.replaces:
            for left in [each for each in self._sessions if each.startswith(terms.replaces)]:
                self.end(left)
        self._check_room(name, now)
        self._sessions[name] = GatewaySession(name, now, terms)

    @contextmanager
    def using(self, name: str, now: float) -> Iterator[GatewaySession]:
        """Give the session, created if missing, during the block, in which it does not expire.

        Raises ApiError if a session of a run's sample is missing, because a new one would lack its terms and earlier
        turns, and if there is no room for the session or another turn.
        """
        self.expire(now)
        if name.startswith(RUN_SESSIONS) and name not in self._sessions:
            raise no_session()
        self._check_room(name, now)
        session = self._sessions.pop(name, None) or GatewaySession(name, now)
        self._sessions[name] = session
        session.used_at = now
        session.open_requests += 1
        try:
            yield session
        finally:
            session.open_requests -= 1
            empty = not session.open_requests and not session.turns and session.terms is None
            if empty and self._sessions.get(name) is session:
                self.end(name)  # a failed request keeps no session

    def _check_room(self, name: str, now: float) -> None:
        self.expire(now)
        if self.tokens >= self._most_tokens:
            raise too_many(
                f"the sessions have {self.tokens} tokens, and may have {self._most_tokens}: "
                "end finished sessions by DELETE /v1/sessions/ID"
            )
        if name not in self._sessions and len(self._sessions) >= self._most:
            raise too_many(
                f"there are {self._most} sessions, all used within {self._idle_s:.0f} s: end "
                "those that are finished by DELETE /v1/sessions/ID"
            )

    def count(self, session: GatewaySession, turn: RecordedTurn, now: float) -> None:
        """Count a new turn, unless its session was ended meanwhile."""
        session.used_at = now
        if self._sessions.get(session.name) is session:
            self.tokens += turn.tokens
            self._sessions[session.name] = self._sessions.pop(session.name)

    def end(self, name: str) -> None:
        """Forget a session. Raises ApiError if there is none."""
        self.tokens -= self.get(name).tokens
        del self._sessions[name]

    def expire(self, now: float) -> list[str]:
        """Forget the sessions that were unused too long; return their names."""
        ended = []
        for name, session in list(self._sessions.items()):
            if now - session.used_at <= self._idle_s:
                break  # later ones were used more recently
            if not session.open_requests:
                self.end(name)
                ended.append(name)
        return ended
