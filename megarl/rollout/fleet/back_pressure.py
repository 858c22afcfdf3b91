"""The number of requests that an engine gets at a time, by the room in its KV cache. Pure.

An engine whose cache is full throws requests out of its batch and computes them again later. Requests that wait outside
can go to another engine instead. So each engine has a limit that follows the classic rule of congestion control:
additive increase, multiplicative decrease. There is no limit before the first sign of pressure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megarl.rollout.engine.engine_load import EngineLoad

FULL = 0.95  # share of the KV cache; a request that waits for another reason sees less
DECREASE = 0.75
ENDED_PER_INCREASE = 8


class BackPressure:
    """Keeps a limit for each replica, from its reports."""

    def __init__(self) -> None:
        self._limits: dict[int, float] = {}

    def limit(self, replica: int) -> float:
        """Return how many requests a replica may have in flight; infinity if nothing is known against more."""
        return self._limits.get(replica, math.inf)

    def full(self, in_flight: Mapping[int, int], more: int) -> set[int]:
        """Return the replicas that have no room for `more` requests. One that is idle has room for any number."""
        return {replica for replica, now in in_flight.items() if now and now + more > self.limit(replica)}

    def reported(self, replica: int, load: EngineLoad, in_flight: int, ended: int) -> None:
        """Adapt a replica's limit to its report, made when it had `in_flight` requests, of which `ended` ended.

        Under pressure the limit falls once, and not again before the requests above it have ended.
        """
        limit = self.limit(replica)
        if load.waiting and load.kv_usage >= FULL:
            if in_flight <= limit:
                self._limits[replica] = max(in_flight * DECREASE, 1.0)
        elif limit < math.inf:
            self._limits[replica] = limit + ended / ENDED_PER_INCREASE

    def forget(self, replica: int) -> None:
        """Forget a replica that is lost or new."""
        self._limits.pop(replica, None)
