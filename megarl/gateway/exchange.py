"""One request of a client and its responses, which follow the terms of its session and are recorded there."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from megarl.gateway.pool_client import ControllerClient, Generation
from megarl.gateway.request_fields import BOUNDS, ApiError, SamplingChoice
from megarl.gateway.sessions import GatewaySession, RecordedTurn, Sessions, ShownImage
from megarl.rollout.engine.messages import GenerateRequest, request_seed, shared
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.fleet.external_requests import ExternalRequest


class Exchange:
    """A request and its responses. `id`: a unique name; `parent`: the turn of its session that it continues."""

    def __init__(
        self, pool: ControllerClient, timeout_s: float, sessions: Sessions, session: GatewaySession | None
    ) -> None:
        """`timeout_s`: the time limit of a response. `session`: None: nothing is recorded."""
        self.id = uuid.uuid4().hex
        self.session = session
        self.prompt_ids: list[int] = []
        self.parent: RecordedTurn | None = None
        self.shown: tuple[ShownImage, ...] = ()
        self.responses: list[Generation] = []
        self._pool, self._timeout_s, self._sessions = pool, timeout_s, sessions
        self._turns: list[int] = []

    def begin(
        self, prompt_ids: list[int], asked: SamplingChoice, parent: RecordedTurn | None,
        interval_s: float | None = None, shown: tuple[ShownImage, ...] = (),
    ) -> None:  # fmt: skip
        """Request the responses to a prompt, sampled as `asked`, or as the terms of the session say.

        `shown`: the images after the tokens of `parent`. `interval_s`: see `ExternalRequest`. Raises ApiError if the
        session may make no more requests, or if too many responses are running.
        """
        # As far as the gateway knows, requests without a session share no beginning.
        prefix, of_group, deadline = self.id, False, None
        if (session := self.session) is not None:
            prefix = f"session {session.name}"
            session.asked += 1
            if (terms := session.terms) is not None:
                asked = terms.choice(asked, session.asked - 1)
                of_group, deadline = terms.prefix is not None, terms.deadline
                prefix = terms.prefix or prefix if parent is None else prefix
        self.prompt_ids, self.parent, self.shown = prompt_ids, parent, shown
        if session is not None and parent is not None:
            shown = (*session.shown_through(parent.number), *shown)
        request = GenerateRequest(
            "", prompt_ids, asked.spec, images=tuple(each for each, _ in shown),
            files=tuple(shared(file) for _, file in shown),
        )  # fmt: skip
        replica = None if parent is None else parent.replica
        # The first response has the request's seed, the others have derived ones.
        seeds = [asked.seed if not i or asked.seed is None else request_seed(asked.seed, 0, i) for i in range(asked.n)]
        self.responses = self._pool.open(
            ExternalRequest(
                replace(request, seed=seed), prefix, self._timeout_s, replica, interval_s,
                of_group=of_group, deadline=deadline,
            )
            for seed in seeds
        )  # fmt: skip

    async def results(self) -> list[ResponsePart]:
        """Wait until the responses have ended, and return them. Raises ApiError for the first failed one."""
        for each in self.responses:
            await each.more_than(float("inf"))
        return [each.result() for each in self.responses]

    def record(self, response: Generation, part: ResponsePart, **chat: Any) -> None:  # noqa: ANN401  # as they are there
        """Record the tokens of an ended response. `chat`: `key`, `messages` and `calls` of a chat's turn."""
        if self.session is None:
            return
        parent = None if self.parent is None else self.parent.number
        turn = self.session.record(
            self.prompt_ids, part, parent=parent, request_id=self.id, replica=response.replica, shown=self.shown, **chat
        )
        self._sessions.count(self.session, turn, time.monotonic())
        self._turns.append(turn.number)

    def fields(self) -> dict[str, Any]:
        """Return the answer's session fields: the numbers of its new turns and of the turn they continue."""
        if self.session is None:
            return {}
        parent = None if self.parent is None else self.parent.number
        return {"session": {"id": self.session.name, "turns": self._turns, "parent": parent}}


@contextmanager
def exchange_in(sessions: Sessions, name: str | None, pool: ControllerClient, timeout_s: float) -> Iterator[Exchange]:
    """Give the exchange of a request, in the session `name` if it has one; drop open responses at the end.

    The session records if the request exceeded a bound, so that the run knows why its agent fails. Raises as
    `Sessions.using`.
    """
    with nullcontext() if name is None else sessions.using(name, time.monotonic()) as session:
        exchange = Exchange(pool, timeout_s, sessions, session)
        try:
            yield exchange
        except ApiError as error:
            if session is not None and error.code in BOUNDS:
                session.refused = error.code or ""
            raise
        finally:
            for each in exchange.responses:
                pool.drop(each)
