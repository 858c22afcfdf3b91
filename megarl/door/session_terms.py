"""The terms of a session that the run itself has opened for one of its samples: they hold for all of its requests.

The run decides what is trained on: a request of such a session is sampled as the run's other responses, whatever its
own sampling fields say. It may only ask for fewer tokens and for further stop tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from megarl.door.api_errors import ApiError, no_turn_left
from megarl.door.sampling_fields import SamplingChoice
from megarl.rollout.foreign_requests import GroupTerms
from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.requests import SamplingSpec, request_seed

RUN_SESSIONS = "megarl-"  # begins the names of the sessions of a run's own samples, which nothing but PUT opens


class GroupOpening(msgspec.Struct, forbid_unknown_fields=True):
    """The group of the run that a session is opened for, as `PUT /v1/sessions/ID` sends it.

    `prefix`: equal for the sessions whose first prompts are equal. `left_s`: the seconds until the group's deadline,
    which is `seconds` after its start; None: it has none.
    """

    prefix: str
    left_s: float | None = None
    seconds: float = 0.0
    policy: Literal["cut", "fail"] = "cut"


class SessionOpening(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /v1/sessions/ID`. `seed`: None for responses that need none; `group`: None outside training.

    `most_turns`: the requests that it may make; None: as many as its agent needs.

    `replaces`: sessions whose names begin so are ended, because an attempt that died has left them; "": none.
    """

    sampling: SamplingSpec
    seed: int | None = None
    group: GroupOpening | None = None
    replaces: str = ""
    most_turns: int | None = None


@dataclass(frozen=True)
class SessionTerms:
    """The sampling of every request of a session, and the group for which it is made; see `SessionOpening`."""

    sampling: SamplingSpec
    seed: int | None = None
    prefix: str | None = None
    deadline: GroupDeadline | None = None
    most_turns: int | None = None

    @classmethod
    def of(cls, opening: SessionOpening, now: float) -> SessionTerms:
        """Return the terms of a session that is opened `now`, on the clock that `group` is asked with."""
        group = opening.group
        if group is None:
            return cls(opening.sampling, opening.seed, most_turns=opening.most_turns)
        deadline = GroupTerms(group.left_s, group.seconds, group.policy).deadline(now)
        return cls(opening.sampling, opening.seed, group.prefix, deadline, opening.most_turns)

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

    def group(self, now: float) -> GroupTerms | None:
        """Return what a request has of the group when it is sent; None if the session is of no group."""
        if self.prefix is None:
            return None
        if self.deadline is None:
            return GroupTerms()
        return GroupTerms(max(0.0, self.deadline.at - now), self.deadline.seconds, self.deadline.policy)


def read_opening(body: Mapping[str, Any]) -> SessionOpening:
    """Return the body of `PUT /v1/sessions/ID`. Raises ApiError that says what is wrong with it."""
    try:
        return msgspec.convert(body, SessionOpening)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the session cannot be opened: {error}") from None
