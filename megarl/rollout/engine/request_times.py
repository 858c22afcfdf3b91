"""The times at which an engine began with each request and made its first token, as vLLM's engine process reports them.

vLLM sends the time at which a request was scheduled together with its first token, if it keeps statistics in the engine
process. The front end's own statistics, which cost time for each token, stay off: the hook looks at one field of each
output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

SCHEDULED = 2  # vllm.v1.engine.EngineCoreEventType.SCHEDULED


@dataclass
class _Times:
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None


class RequestTimes:
    """The times of the requests on which an engine works, in seconds of the monotonic clock, which is the host's."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open: dict[str, _Times] = {}

    def begin(self, name: str, arrived: float) -> None:
        """Record that a request has come."""
        self._open[name] = _Times(arrived)

    def end(self, name: str) -> None:
        """Forget a request."""
        self._open.pop(name, None)

    def hear(self, name: str, output: EngineCoreOutput, at: float | None) -> None:
        """Take note of an output of the engine that has events of its request. `at`: when the engine sent it."""
        times = self._open.get(name)
        if times is None or times.first_token is not None:
            return
        for event in output.events or ():
            if event.type == SCHEDULED and times.scheduled is None:
                times.scheduled = event.timestamp
        if output.new_token_ids and times.scheduled is not None:
            times.first_token = self._now() if at is None else at

    def parts(self, name: str, *, ended: bool) -> tuple[float, float]:
        """Return the seconds for which a request waited in the engine's queue, and those of its prefill, so far.

        As long as the engine has not told of it, it waits. If it has `ended` so, nothing is known: both are 0.
        """
        times = self._open.get(name)
        if times is None or (ended and times.scheduled is None):
            return 0.0, 0.0
        now = self._now()
        began = now if times.scheduled is None else times.scheduled
        first = now if times.first_token is None else times.first_token
        queue_s = max(0.0, began - times.arrived)
        return queue_s, 0.0 if times.scheduled is None else max(0.0, first - max(began, times.arrived))

    def listen(self, engine: AsyncLLM) -> None:
        """Let the engine's front end tell of outputs that have events."""
        processor: Any = engine.output_processor
        before = processor._update_stats_from_output

        def told(state: RequestState, output: EngineCoreOutput, at: float | None, stats: object) -> None:
            if output.events:
                self.hear(state.external_req_id, output, at)
            before(state, output, at, stats)

        processor._update_stats_from_output = told
