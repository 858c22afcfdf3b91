"""Keeps the gateway of a run open: starts it, checks it at intervals without waiting, and replaces a dead one. If the
gateway cannot be reopened, attempts continue until the run ends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megarl.gateway.actor import GatewaySpec, create_gateway

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

BEAT_S = 2.0  # between two looks at the gateway
LONGEST_PAUSE_S = 60.0  # between two attempts to open it again


class GatewayKeeper:
    """The supervisor's side of the gateway. `look` is called often; it never waits and never raises."""

    def __init__(
        self, spec: GatewaySpec, *, own_head: bool, bound_s: float, start_s: float, say: Callable[[str], object]
    ) -> None:
        """`bound_s`: how long the gateway may leave a look unanswered; `start_s`: how long its start may take. `say`
        gets messages for the user.
        """
        self._spec, self._own_head, self._bound_s, self._start_s, self._say = spec, own_head, bound_s, start_s, say
        self._gateway: ActorHandle | None = None
        self._asked: ObjectRef | None = None
        self._asked_at = 0.0
        self._starting = False
        self._next = 0.0  # when to look, or to try, again
        self._failures = 0  # in a row
        self.url = ""

    def open(self) -> ObjectRef:
        """Create the gateway; return the reference of its start, whose result `opened` takes."""
        self._gateway = create_gateway(self._spec, own_head=self._own_head)
        return self._gateway.start.remote()

    def opened(self, answer: dict[str, Any]) -> None:
        """Note the gateway's address. A gateway that replaces it takes the same port."""
        self.url = str(answer["url"])
        self._spec = replace(self._spec, port=int(answer["port"]))
        self._failures = 0

    def look(self) -> None:
        """Check whether the gateway is alive, and open another one if not."""
        import ray

        now = time.monotonic()
        if self._asked is None:
            if now >= self._next:
                self._ask(now)
            return
        done, _ = ray.wait([self._asked], timeout=0)
        bound_s = self._start_s if self._starting else self._bound_s
        late = now - self._asked_at > bound_s
        if not done and not late:
            return
        try:
            answer = ray.get(self._asked, timeout=0)
        except Exception as error:
            self._lost(error if done else TimeoutError(f"it has not answered for {bound_s:.0f} s"), now)
            return
        if self._starting:
            self.opened(answer)
            self._say(f"the gateway is open again at {self.url}; its earlier sessions are gone")
        self._asked, self._starting, self._next = None, False, now + BEAT_S

    def close(self) -> list[ActorHandle]:
        """Return the actors to shut down: the gateway, if there is one."""
        return [] if self._gateway is None else [self._gateway]

    def _ask(self, now: float) -> None:
        try:
            if self._gateway is None:
                self._asked, self._starting = self.open(), True
            else:
                self._asked = self._gateway.heartbeat.remote()
            self._asked_at = now
        except Exception as error:
            self._lost(error, now)

    def _lost(self, error: BaseException, now: float) -> None:
        """End what is left of the gateway; it is opened again, at once after the first failure."""
        import ray

        cause = str(getattr(error, "cause", None) or error).strip().splitlines()
        what = "could not be opened" if self._starting else "has died"
        self._say(f"the gateway {what} ({cause[0] if cause else type(error).__name__}) and is opened again")
        if self._gateway is not None:
            try:
                ray.kill(self._gateway)
            except Exception as failure:
                logger.warning("the gateway was not killed: %s", failure)
        pause_s = min(LONGEST_PAUSE_S, 2.0**self._failures - 1.0)
        self._failures += 1
        self._gateway, self._asked, self._starting, self._next = None, None, False, now + pause_s
