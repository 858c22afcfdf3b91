"""The replicas that are being replaced, and the requests that wait for one while none serves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from megarl.config.schema import TimeoutsConfig


class Replacements:
    """Knows whether a replacement is coming: one that is started, one without weights, or one that a sync brings.

    A weight sync that fails leaves replicas that refuse every call, and then has them restarted. The pool sees them
    refuse before it is asked for the restart, so a replacement may be coming as long as a sync is under way.
    """

    def __init__(self, timeouts: TimeoutsConfig, sync_restarts: int) -> None:
        """`sync_restarts`: how often a failed sync is repeated with new replicas (`weight_sync.restarts`)."""
        # All attempts at a sync, with a restart between two of them.
        self.timeout_s = (sync_restarts + 1) * timeouts.weight_sync_s + sync_restarts * timeouts.engine_start_s
        self._sync_restarts = sync_restarts
        self._in_sync = False
        self._publishes = False
        self._starting: set[int] = set()
        self._joining: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def coming(self) -> bool:
        """True if a replica may serve later: it is on its way, or the trainer can be asked for a sync."""
        return self.under_way or self._publishes

    @property
    def under_way(self) -> bool:
        """True if a replica may serve later without anything else happening before."""
        return bool(self._in_sync or self._starting or self._joining)

    def expect(self, publishes: bool) -> None:
        """Record whether the trainer makes a sync as soon as it is asked for one, which then replaces lost replicas."""
        self._publishes = publishes and self._sync_restarts > 0
        self._changed.set()

    def comes(self, index: int) -> bool:
        """Tell whether replica `index` is being started or about to join."""
        return index in self._starting or index in self._joining

    def begin_sync(self) -> bool:
        """Record that a weight sync is about to begin. Return whether it replaces replicas that refuse it."""
        self._in_sync = self._sync_restarts > 0
        return self._in_sync

    def end_sync(self) -> None:
        """Record that no sync is under way: it is complete, or the trainer that made it has gone."""
        self._in_sync = False
        self._changed.set()

    @contextlib.contextmanager
    def starting(self, index: int) -> Iterator[None]:
        """Count replica `index` as coming; if it has started, it then joins, else nothing is coming from it."""
        self._starting.add(index)
        self._joining.discard(index)
        try:
            yield
            self.join(index)
        finally:
            self._starting.discard(index)
            self._changed.set()

    def join(self, index: int) -> None:
        """Record that replica `index` can serve as soon as it has the current weights."""
        self._joining.add(index)

    def take_joining(self) -> list[int]:
        """Return the replicas that join, sorted: they serve from now on."""
        joining, self._joining = sorted(self._joining), set()
        return joining

    async def wait(self, until: float) -> None:
        """Wait for a change, to the time `until` (`time.monotonic`) at the latest."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                await self._changed.wait()
