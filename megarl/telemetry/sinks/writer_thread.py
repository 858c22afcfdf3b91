"""Writes in one thread, in the order in which they were given, so that a slow disk or service delays no training step.

What waits is bounded, and so is every wait for the thread: a write that does not end is an error that names it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

MOST_WAITING = 256  # writes, those of some dozen steps with their samples


class WriterHungError(TimeoutError):
    """The thread has finished nothing for as long as a wait for it may take."""


class WriterThread:
    """Calls functions one after the other in a daemon thread, which begins with the first of them.

    What a function raises is kept, and raised by the next method that is called: no failure is silent. One thread at a
    time may call the methods.
    """

    def __init__(self, owner: str, bound_s: float, bound: str, most: int = MOST_WAITING) -> None:
        """`owner`: who the messages say writes; `bound_s`: seconds without a finished write after which a wait fails.

        `bound`: the config key of the bound; `most`: writes that wait at a time.
        """
        self._owner, self._bound_s, self._bound, self._most = owner, bound_s, bound, most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()  # the first one is being done
        self._moved = 0.0  # when the first one became the first
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, what: str, write: Callable[[], object]) -> None:
        """Let the thread call `write`; `what` names its target in messages. Waits for a place if too many wait.

        Raises WriterHungError, what an earlier write has raised, and RuntimeError after `close`.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._owner} is closed; {what} can no longer be written")
            self._wait(lambda: len(self._waiting) < self._most, self._bound_s, self._bound)
            self._append(what, write)
            self._raise_failure()

    def flush(self) -> None:
        """Wait until all writes are done. Raises WriterHungError, and what a write has raised."""
        with self._changed:
            self._wait(lambda: not self._waiting, self._bound_s, self._bound)
            self._raise_failure()

    def close(self, last: Sequence[tuple[str, Callable[[], object]]], bound_s: float, bound: str) -> None:
        """Do what is left, then `last` (as `submit` gets it), and end the thread, with a bound of their own.

        Raises as `flush` does.
        """
        with self._changed:
            for what, write in last:
                self._append(what, write)
            self._closed = True
            self._changed.notify_all()
            self._wait(lambda: not self._waiting, bound_s, bound)
            self._raise_failure()

    def _append(self, what: str, write: Callable[[], object]) -> None:
        if not self._waiting:
            self._moved = time.monotonic()
        self._waiting.append((what, write))
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._owner.replace(" ", "-"), daemon=True)
            self._thread.start()

    def _wait(self, ready: Callable[[], bool], bound_s: float, bound: str) -> None:
        while not ready():
            left = self._moved + bound_s - time.monotonic()
            if left <= 0:
                what, number = self._waiting[0][0], len(self._waiting)
                raise WriterHungError(
                    f"{self._owner} has written nothing for {bound_s:.0f} s ({bound}): it is busy with {what}, and "
                    f"{number - 1} more writes wait; check the disk of the run directory, and the service if it is one"
                )
            self._changed.wait(left)

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait()
                what, write = self._waiting[0]
            failure: BaseException | None = None
            try:
                write()
            except BaseException as error:
                logger.exception("%s could not write %s", self._owner, what)
                failure = error
            with self._changed:
                self._failure = self._failure or failure
                self._waiting.popleft()
                self._moved = time.monotonic()
                self._changed.notify_all()
