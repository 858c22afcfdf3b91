"""Waits in a thread for the end of a stage of a weight sync, so that no member polls the store.

A stage (the forming of a group, or a sync) has an *end* key in the store, which is set once: to the result, or to the
reason of an abort. Every member waits for it in one blocking request. After an abort each member answers once what it
was doing (`member_progress.py`), even if its main thread is stuck, and the leader finds the cause in the answers.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from megarl.common.errors import NotAuthentic, PeerTimeout
from megarl.weights.group.member_progress import MemberProgress
from megarl.weights.group.store import STORE_TIMEOUT_S, SyncStore

logger = logging.getLogger(__name__)


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
        """Wait until the thread has ended, which it does soon after the stage. Only then is its connection free.

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
        finally:  # whatever the answer raises, the main thread learns of the end
            self._end = end
            self._ended.set()
        if "abort" not in end:
            return
        try:
            self._connection.put(answer_key(self._stage, self._member), answer.to_json())
        except RuntimeError as error:
            logger.warning("%s could not say what it was doing: %s", self._member, error)


def end_key(stage: str) -> str:
    """Return the key that ends a stage."""
    return f"{stage}/end"


def answer_key(stage: str, member: str) -> str:
    """Return the key of a member's answer after an abort."""
    return f"{stage}/answer/{member}"
