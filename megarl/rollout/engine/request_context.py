"""The context of a request to an engine: what it shares with other requests, and where it should go. Pure."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any

from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.response_parts import ResponsePart


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Goes with a request from its loop to the replica. Requests with the same prefix have the same context.

    `prefix`: such requests share the beginning of their prompts and go to one replica; None shares nothing. `home`: a
    number that alone determines the replica. `near`: a replica that has the prefix in its cache (see `Router.assign`).
    `deadline`: when the responses have to end. `tokens`: those that responses have already, by request id; they are
    continued, and it is kept up to date.
    """

    prefix: Hashable = None
    home: int | None = None
    near: int | None = None
    deadline: GroupDeadline | None = None
    tokens: MutableMapping[str, ResponsePart] | None = None


Generate = Callable[[GenerateRequest, RequestContext], Coroutine[Any, Any, GenerateResult]]
"""The way of a request to the engines (`RequestCoalescer.generate`)."""
