"""A stage of a weight sync: a member's state, and a thread that waits for the end of the stage, so no member polls.

A stage is the forming of a group, or a sync. Its *end* key in the store is set once: to the result, or to the reason of
an abort. Every member waits for it in one blocking request. After an abort each member reports once what it was doing,
even if its main thread is stuck. The leader finds the cause in these answers.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.common.errors import NotAuthentic, PeerTimeout
from megarl.weights.group.store import STORE_TIMEOUT_S, SyncStore

logger = logging.getLogger(__name__)


def _nobody() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Answer:
    """A member's report of what it is doing. `waits_for` names the members that it needs to continue. In a broadcast
    (`bucket`, its index) these are only known from all members' answers together, see `failure.waits_of`. `entered`:
    the number of broadcasts that the member has begun. `seconds`: the time since it has been doing this. `expired`: its
    deadline passed while it waited. `done`: it has done its part in the sync. `failure`: why it failed itself, if it
    did, and `secondary` if it only waited for another member, or saw the failure of one.
    """

    member: str
    doing: str
    waits_for: Sequence[str] = ()
    bucket: int | None = None
    entered: int = 0
    seconds: float = 0.0
    expired: bool = False
    done: bool = False
    failure: str | None = None
    secondary: bool = False


class MemberProgress:
    """The state of one member in one sync. One thread sets it; another one may read it at any time."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._entered = 0
        self._frozen: Answer | None = None
        self._done = False
        self.work("begins")

    def work(self, doing: str) -> None:
        """The member waits for no other."""
        self._now: tuple[str, Callable[[], Sequence[str]], int | None, float] = (doing, _nobody, None, time.monotonic())

    def wait(self, doing: str, waits_for: Callable[[], Sequence[str]]) -> None:
        """The member waits for those that `waits_for` names when called."""
        self._now = (doing, waits_for, None, time.monotonic())

    def enter(self, bucket: int) -> None:
        """The member has begun to take part in the broadcast of a bucket."""
        self._entered = bucket + 1

    def wait_in_broadcast(self, bucket: int) -> None:
        """The member waits for the end of a broadcast."""
        self._now = (f"the broadcast of bucket {bucket + 1}", _nobody, bucket, time.monotonic())

    def mark_done(self) -> None:
        """Record that the member has done its part and only waits for the end of the sync."""
        self._done = True
        self.work("has done its part")

    def freeze(self, *, expired: bool = False) -> None:
        """Freeze the current answer: the member ends its part in the sync. `expired`: as in `Answer`."""
        if self._frozen is None:
            self._frozen = replace(self._current(), expired=expired)

    def fail(self, failure: str, *, secondary: bool) -> None:
        """Freeze the current answer, with the failure of the member."""
        self._frozen = replace(self.answer(), failure=failure, secondary=secondary)

    def answer(self) -> Answer:
        """Return what the member does, or did when it was frozen."""
        return self._frozen or self._current()

    def _current(self) -> Answer:
        doing, waits_for, bucket, since = self._now
        seconds = round(time.monotonic() - since, 1)
        return Answer(self._member, doing, tuple(waits_for()), bucket, self._entered, seconds, done=self._done)


class StageWatch:
    """The wait for the end of one stage. `stage` is the stage's prefix of keys."""

    def __init__(
        self, connection: SyncStore, stage: str, progress: MemberProgress, member: str, timeout_s: float
    ) -> None:
        """`connection`: one of its own, used until the stage has ended. `timeout_s`: an upper bound for the wait."""
        self._connection, self._stage, self._progress, self._member = connection, stage, progress, member
        self._timeout_s = timeout_s
        self._ended = threading.Event()
        self._end: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="weight-sync-watch", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> dict[str, Any] | None:
        """Wait at most `timeout_s` seconds. Return the value of the end key, {"abort": reason} after a failure."""
        return self._end if self._ended.wait(timeout_s) else None

    @property
    def abort_reason(self) -> str | None:
        """The reason why the stage was aborted, or None."""
        return self._end.get("abort") if self._ended.is_set() else None

    def join(self, timeout_s: float = STORE_TIMEOUT_S) -> None:
        """Wait until the thread has ended, soon after the stage. Only then is its connection free.

        Raises PeerTimeout if it has not ended within `timeout_s` seconds.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise PeerTimeout(f"{self._member} waited {timeout_s:.0f} s for trainer rank 0 to end stage {self._stage}")

    def _run(self) -> None:
        try:
            end = self._connection.block(end_key(self._stage), self._timeout_s)
            reason = f"{self._member} waited {self._timeout_s:.0f} s for the end of the weight sync"
        except NotAuthentic as error:
            end, reason = None, f"{self._member}: {error}"
        except RuntimeError as error:
            end, reason = None, f"{self._member} lost its connection to trainer rank 0: {error}"
        if end is None:
            end = {"abort": reason}
        try:
            answer = self._progress.answer()  # before the main thread reacts
        finally:  # even if the answer raises, the main thread learns of the end
            self._end = end
            self._ended.set()
        if "abort" not in end:
            return
        try:
            self._connection.put(answer_key(self._stage, self._member), asdict(answer))
        except RuntimeError as error:
            logger.warning("%s could not report what it was doing: %s", self._member, error)


def end_key(stage: str) -> str:
    """Return the key that ends a stage."""
    return f"{stage}/end"


def answer_key(stage: str, member: str) -> str:
    """Return the key of a member's answer after an abort."""
    return f"{stage}/answer/{member}"
