"""Opens the responses to a request at the controller, and waits for their ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from megarl.gateway.api_errors import ApiError, not_generated
from megarl.gateway.pool_client import ControllerLink, Generation
from megarl.gateway.request_fields import SamplingChoice
from megarl.rollout.engine.group_deadline import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, request_seed
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.fleet.external_requests import ForeignRequest

MOST_OPEN = 16_384  # responses under way: 2,000 sessions with eight each
# The controller's own message comes first: it knows for whom the request waits.
MARGIN_S = 15.0


@dataclass(frozen=True)
class SessionPlace:
    """Holds where a request belongs; see `ForeignRequest`. The deadline is on the clock of this process."""

    prefix: str
    replica: int | None = None
    of_group: bool = False
    deadline: GroupDeadline | None = None


class Generations:
    """Opens responses; each is waited for `timeout_s` at most."""

    def __init__(self, link: ControllerLink, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s

    @asynccontextmanager
    async def open(
        self, prompt_ids: list[int], sampling: SamplingChoice, place: SessionPlace, *, interval_s: float | None = None
    ) -> AsyncIterator[list[Generation]]:
        """Give the responses to a prompt, which are under way; those that are still at the end are dropped.

        `interval_s`: see `ForeignRequest`. Raises ApiError if there are too many, and if the
        block lasts longer than a response may take.
        """
        if self._link.open_requests + sampling.n > MOST_OPEN:
            told = f"{self._link.open_requests} responses are under way, and {MOST_OPEN} may be; try again later"
            raise ApiError(429, told, kind="rate_limit_error", code="rate_limit_exceeded")
        opened = [
            self._link.open(
                ForeignRequest(
                    GenerateRequest("", prompt_ids, sampling.spec, _seed(sampling.seed, index)),
                    place.prefix, self._timeout_s, place.replica, interval_s, of_group=place.of_group,
                    deadline=place.deadline,
                )
            )
            for index in range(sampling.n)
        ]  # fmt: skip
        try:
            async with asyncio.timeout(self._timeout_s + MARGIN_S) as limit:
                yield opened
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._unreachable() from None
        finally:
            for each in opened:
                self._link.drop(each)

    def _unreachable(self) -> ApiError:
        lost_s = self._link.lost_s(time.monotonic())
        told = f"the door waited {self._timeout_s + MARGIN_S:.0f} s (door.request_timeout_s) for the rollout controller"
        if lost_s:
            told += f", which it has not reached for {lost_s:.0f} s"
        return not_generated("late", told)


async def ends_of(generations: Sequence[Generation]) -> list[ResponsePart]:
    """Wait until responses have ended; return them. Raises ApiError for the first that failed."""
    for each in generations:
        await each.end()
    return [checked(each) for each in generations]


def checked(generation: Generation) -> ResponsePart:
    """Return the tokens of a response. Raises ApiError if it failed."""
    if generation.failure:
        raise not_generated(generation.failure, generation.error)
    return generation.part


def _seed(seed: int | None, index: int) -> int | None:
    """Return the seed of a response: that of the request for the first one, different ones for the others."""
    return seed if seed is None or index == 0 else request_seed(seed, 0, index)
