"""Writes in order from one thread, so that a slow disk or service delays no training step.

The queue is bounded, and so is every wait for the thread: the error names the write that hangs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

MOST_WAITING = 256  # writes: a few dozen steps with their samples


class WriterHungError(TimeoutError):
    """The thread finished no write within the bound."""


class WriterThread:
    """Calls functions one after the other in a daemon thread, which starts with the first one.

    The next method called raises what a function raised: no failure is silent. One thread at a time may call methods.
    """

    def __init__(self, owner: str, bound_s: float, bound: str, most: int = MOST_WAITING) -> None:
        """`owner`: the writer's name in messages. `bound_s`: seconds without a finished write after which waits fail.

        `bound`: the config key of the bound. `most`: writes that may wait at a time.
        """
        self._owner, self._bound_s, self._bound, self._most = owner, bound_s, bound, most
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()  # the first one is running
        self._moved = 0.0  # when the first one came to the front
        self._failure: BaseException | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, what: str, write: Callable[[], object]) -> None:
        """Queue `write` for the thread; `what` names its target in messages. Waits while the queue is full.

        Raises WriterHungError, what an earlier write raised, and RuntimeError after `close`.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._owner} is closed; {what} cannot be written")
            self._wait(lambda: len(self._waiting) < self._most, self._bound_s, self._bound)
            self._append(what, write)
            self._raise_failure()

    def flush(self) -> None:
        """Wait until all writes are done. Raises WriterHungError, and what a write raised."""
        with self._changed:
            self._wait(lambda: not self._waiting, self._bound_s, self._bound)
            self._raise_failure()

    def close(self, last: Sequence[tuple[str, Callable[[], object]]], bound_s: float, bound: str) -> None:
        """Finish the queue, then `last` (as for `submit`), and end the thread; `bound_s` replaces the usual bound.

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
