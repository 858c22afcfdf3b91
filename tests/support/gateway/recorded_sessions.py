"""Sessions as the gateway records them and tells of them, from trees of turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from megarl.gateway.sessions import GatewaySession, session_content
from megarl.queue.trajectory import VersionSpan
from megarl.rollout.engine.response_parts import ResponsePart


def recorded(turns: Sequence[tuple[int | None, Sequence[int], Sequence[int]]]) -> dict[str, Any]:
    """The answer to `GET /v1/sessions/ID` of turns (parent, inserted tokens, response), as JSON brings it."""
    session = GatewaySession("s", 0.0)
    for number, (parent, inserted, response) in enumerate(turns):
        cut = len(response) // 2
        spans = (VersionSpan(number, 0, cut), VersionSpan(number + 1, cut, len(response)))
        logprobs = [-(number + 1) / 8 - token / 64 for token in response]
        part = ResponsePart(
            list(response), logprobs, tuple(span for span in spans if span.end > span.start), "stop"
        )  # fmt: skip
        session.record([*session.ids_through(parent), *inserted], part, parent=parent)
    content: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(session_content(session)))
    return content
