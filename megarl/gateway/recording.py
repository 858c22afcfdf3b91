"""Records the turns of one request in its session; without a session nothing is recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megarl.gateway.pool_client import SessionPlace
from megarl.gateway.request_fields import SamplingChoice
from megarl.gateway.sessions import NO_CHAT, ChatTurn, GatewaySession, RecordedTurn, Sessions
from megarl.gateway.token_route import finite, wire_spans
from megarl.rollout.engine.response_parts import ResponsePart


class Recording:
    """The session of one request, as its handler uses it."""

    def __init__(self, sessions: Sessions, session: GatewaySession | None, request_id: str) -> None:
        """`session`: None if the request has none."""
        self._sessions, self._session = sessions, session
        # Requests without a session share no beginning with others, as far as the gateway knows.
        self._prefix = request_id if session is None else f"session {session.name}"
        self._terms = None if session is None else session.terms
        self._parent: int | None = None
        self._turns: list[int] = []

    def sampling(self, asked: SamplingChoice) -> SamplingChoice:
        """Return how the request is sampled: as it asks for, or as its session says.

        Raises ApiError if the session may make no further request.
        """
        if self._session is None or self._terms is None:
            return asked
        number, self._session.asked = self._session.asked, self._session.asked + 1
        return self._terms.choice(asked, number)

    def place(self, parent: RecordedTurn | None) -> SessionPlace:
        """Return where a request belongs that continues `parent`."""
        terms, prefix = self._terms, self._prefix
        replica = None if parent is None else parent.replica
        if terms is None:
            return SessionPlace(prefix, replica)
        if terms.prefix is not None and parent is None:
            prefix = terms.prefix
        return SessionPlace(prefix, replica, terms.prefix is not None, terms.deadline)

    def by_key(self, key: str) -> RecordedTurn | None:
        """Return the turn that ended the conversation with this key."""
        return None if self._session is None else self._session.by_key(key)

    def continued_by(self, prompt_ids: list[int]) -> RecordedTurn | None:
        """Return the turn whose tokens are the longest beginning of a prompt."""
        return None if self._session is None else self._session.continued_by(prompt_ids)

    def ids_through(self, turn: RecordedTurn) -> list[int]:
        """Return all tokens of a turn's prompt and response."""
        assert self._session is not None
        return self._session.ids_through(turn.number)

    def add(
        self, prompt_ids: list[int], part: ResponsePart, parent: RecordedTurn | None, request_id: str, replica: int,
        chat: ChatTurn = NO_CHAT,
    ) -> None:  # fmt: skip
        """Record a response that has ended."""
        if self._session is None:
            return
        self._parent = None if parent is None else parent.number
        turn = self._session.record(
            prompt_ids, part, parent=self._parent, request_id=request_id, replica=replica, chat=chat
        )
        self._sessions.recorded(self._session, turn, time.monotonic())
        self._turns.append(turn.number)

    def fields(self) -> dict[str, Any]:
        """Return what the answer says about the session: the numbers of its new turns and of the one they continue."""
        if self._session is None:
            return {}
        return {"session": {"id": self._session.name, "turns": self._turns, "parent": self._parent}}


@contextmanager
def recording_in(sessions: Sessions, name: str | None, request_id: str) -> Iterator[Recording]:
    """Give the recording of a request in the session `name`; None records nothing. Raises as `using`."""
    if name is None:
        yield Recording(sessions, None, request_id)
        return
    with sessions.using(name, time.monotonic()) as session:
        yield Recording(sessions, session, request_id)


def session_content(session: GatewaySession) -> dict[str, Any]:
    """Return what `GET /v1/sessions/ID` answers: every turn with its exact tokens."""
    return {
        "id": session.name,
        "refused": session.refused or None,
        "turns": [_turn_content(session, turn) for turn in session.turns],
    }


def _turn_content(session: GatewaySession, turn: RecordedTurn) -> dict[str, Any]:
    return {
        "number": turn.number,
        "parent": turn.parent,
        "request_id": turn.request_id,
        "prompt_ids": session.prompt_of(turn.number),
        "response_ids": turn.response_ids.tolist(),
        "logprobs": [finite(value) for value in turn.logprobs],
        "weight_versions": wire_spans(turn.versions),
        "finish_reason": turn.finish_reason,
        "messages": turn.chat.messages,
        "calls": turn.chat.calls,
    }
