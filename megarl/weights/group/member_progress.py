"""The progress of one member of a weight sync, kept in its process and sent to the leader only after a failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


def _nobody() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Answer:
    """A member's answer to the question what it does.

    `waits_for` names the members without which it cannot go on. In a broadcast (`bucket`, its index) these are only
    known from all members' answers together, see `failure_cause.waits_of`. `entered`: the number of broadcasts that the
    member has begun. `seconds`: the time since it has been doing this. `expired`: its deadline passed while it waited.
    `done`: it has done its part in the sync.
    """

    member: str
    doing: str
    waits_for: tuple[str, ...] = ()
    bucket: int | None = None
    entered: int = 0
    seconds: float = 0.0
    expired: bool = False
    done: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON can represent them."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Answer:
        """Return the answer that `to_json` gave as these fields."""
        return cls(**{**fields, "waits_for": tuple(fields["waits_for"])})


class MemberProgress:
    """The state of one member in one sync. One thread sets it; another one may read it at any time."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._entered = 0
        self._frozen: Answer | None = None
        self._done = False
        self.work("begins")

    def work(self, doing: str) -> None:
        """The member waits for nobody."""
        self._now: tuple[str, Callable[[], Sequence[str]], int | None, float] = (doing, _nobody, None, time.monotonic())

    def wait(self, doing: str, waits_for: Callable[[], Sequence[str]]) -> None:
        """The member waits, for those that `waits_for` names when it is called."""
        self._now = (doing, waits_for, None, time.monotonic())

    def enter(self, bucket: int) -> None:
        """The member has begun to take part in the broadcast of a bucket."""
        self._entered = bucket + 1

    def wait_in_broadcast(self, bucket: int) -> None:
        """The member waits for the end of a broadcast."""
        self._now = (f"the broadcast of bucket {bucket + 1}", _nobody, bucket, time.monotonic())

    def mark_done(self) -> None:
        """Record that the member has done its part, and only waits for the end of the sync."""
        self._done = True
        self.work("has done its part")

    def freeze(self, *, expired: bool = False) -> None:
        """Keep the answer of this moment: the member ends its part in the sync. `expired`: as in `Answer`."""
        if self._frozen is None:
            self._frozen = replace(self._current(), expired=expired)

    def answer(self) -> Answer:
        """Return what the member does, or did when it was frozen."""
        return self._frozen or self._current()

    def _current(self) -> Answer:
        doing, waits_for, bucket, since = self._now
        seconds = round(time.monotonic() - since, 1)
        return Answer(self._member, doing, tuple(waits_for()), bucket, self._entered, seconds, done=self._done)
