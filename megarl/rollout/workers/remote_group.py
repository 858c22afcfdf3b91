"""The controller's part of a group that a worker runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from megarl.config.schema import Config
from megarl.rollout.engine.group_deadline import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import Generate, RequestContext
from megarl.rollout.resume.group_progress import UnfinishedGroup
from megarl.rollout.tasks.prompts import Drawn
from megarl.rollout.workers.messages import Asked, StartGroup, ToWorker
from megarl.rollout.workers.remote_run import RemoteProgress, RemoteRun, close_future


class RemoteGroup(RemoteRun):
    """One group, from the first worker to the last. `queued`: once rows are to be written, whether they are."""

    def __init__(
        self, group: int, drawn: Drawn, kept: UnfinishedGroup | None, deadline: GroupDeadline | None, *,
        config: Config, generate: Generate, persist: Callable[[int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """`generate`: the way to the engines. `persist`: see `RunningGroups.persist`."""
        super().__init__(f"group {group}", group, config.batch.samples_per_group, RemoteProgress(drawn, kept))
        self.group, self._drawn, self._generate, self._persist = group, drawn, generate, persist
        self._deadline = deadline
        self._context = RequestContext.of_group(config, group, deadline, self.progress.tokens)
        self.queued: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, run: int, kept: bytes | None) -> ToWorker:
        """See `RemoteRun.start`."""
        left_s = None if self._deadline is None else max(0.0, self._deadline.at - time.monotonic())
        return StartGroup(run, self.group, self._drawn, kept, left_s)

    def request(self, request: GenerateRequest, message: Asked) -> Coroutine[Any, Any, GenerateResult]:
        """See `RemoteRun.request`."""
        return self._generate(request, self._context.of_turn(*message.place, message.near))

    async def persist(self) -> None:
        """See `RemoteRun.persist`: in the journal. Raises RolloutError if they cannot be written."""
        await self._persist(self.group)

    def close(self) -> None:
        """See `RemoteRun.close`."""
        super().close()
        close_future(self.queued)
