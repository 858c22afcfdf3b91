"""The terms of a session that the run itself has opened for one of its samples: they hold for all of its requests.

The run decides what is trained on: a request of such a session is sampled as the run's other responses, whatever its
own sampling fields say. It may only ask for fewer tokens and for further stop tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from megarl.gateway.request_fields import ApiError, SamplingChoice, no_turn_left
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import SamplingSpec, request_seed


class SessionTerms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sampling of every request of a session, and the group that it is for: the body of `PUT /v1/sessions/ID`.

    `seed`: None for responses that need none. `prefix`: equal for the sessions of a group of training, whose first
    prompts are equal; None outside training. `deadline`: that of the group, if it has one; on its way it is as
    `GroupDeadline.sent`. `most_turns`: the requests that the session may make; None: as many as its agent needs.

    `replaces`: sessions whose names begin so are ended, because an attempt that died has left them; "": none.
    """

    sampling: SamplingSpec
    seed: int | None = None
    prefix: str | None = None
    deadline: GroupDeadline | None = None
    replaces: str = ""
    most_turns: int | None = None

    def choice(self, asked: SamplingChoice, number: int) -> SamplingChoice:
        """Return how request `number` of the session is sampled that has asked for `asked`.

        Raises ApiError if the session may not make so many.
        """
        if self.most_turns is not None and number >= self.most_turns:
            raise no_turn_left(self.most_turns)
        most = min(asked.spec.max_tokens, self.sampling.max_tokens)
        stops = tuple(sorted({*asked.spec.stop_token_ids, *self.sampling.stop_token_ids}))
        seed = None if self.seed is None else request_seed(self.seed, 0, 0, number)
        return SamplingChoice(replace(self.sampling, max_tokens=most, stop_token_ids=stops), asked.n, seed)


def read_terms(body: Mapping[str, Any], now: float) -> SessionTerms:
    """Return the body of `PUT /v1/sessions/ID` that has come `now`. Raises ApiError that says what is wrong with it."""
    try:
        terms = msgspec.convert(body, SessionTerms)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the session cannot be opened: {error}") from None
    deadline = None if terms.deadline is None else terms.deadline.received(now)
    return msgspec.structs.replace(terms, deadline=deadline)
