"""The queue as a leader reads it: connected anew when the pool has started another queue in place of one that died."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from megarl.cluster.pool.pool_process import NOTICED_S, SupervisorHandle, await_rebuilt
from megarl.common.errors import PartsLost
from megarl.config.schema import TimeoutsConfig
from megarl.queue.transfer import QueueReader

T = TypeVar("T")


class QueueClient:
    """Reads the present queue; any thread may. What was in an earlier one is lost."""

    def __init__(self, handle: SupervisorHandle, timeouts: TimeoutsConfig) -> None:
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._handle, self._reader = handle, self._attach(handle)

    def read(self, rebuilds: int, question: Callable[[QueueReader], T]) -> T:
        """Return the answer of the queue that the pool has after `rebuilds` new ones.

        Raises PartsLost if that queue has died, or been replaced, and what `question` raises.
        """
        try:
            reader = self._reader_of(rebuilds)
            return question(reader)
        except (PartsLost, KeyError):
            raise
        except Exception as error:
            # The library's own error may come before the supervisor has noticed why.
            if self._handle.has_lost_parts(NOTICED_S):
                raise PartsLost(f"the trajectory queue has died: {error}") from error
            raise

    def _reader_of(self, rebuilds: int) -> QueueReader:
        with self._lock:
            if rebuilds > self._handle.rebuilds:
                timeouts = self._timeouts
                self._handle = await_rebuilt(self._handle, 3 * timeouts.rpc_s + timeouts.engine_start_s)
                self._reader.close()
                self._reader = self._attach(self._handle)
            if rebuilds != self._handle.rebuilds:
                raise PartsLost(f"queue {rebuilds} of the pool has ended; the present one is {self._handle.rebuilds}")
            return self._reader

    def _attach(self, handle: SupervisorHandle) -> QueueReader:
        return QueueReader.attach(
            handle.partition,
            namespace=handle.namespace,
            timeout_s=self._timeouts.rpc_s,
            check=handle.check_parts,
            who=f"trainer rank {os.environ.get('RANK', '0')}",
        )

    def close(self) -> None:
        """Close the connections to the queue; its rows stay."""
        self._reader.close()
