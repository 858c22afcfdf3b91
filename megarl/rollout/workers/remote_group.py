"""The controller's part of a group that a worker runs: its requests, its tokens, the records of its loops.

All of it stays when the worker dies. Requests that are open go on, and another worker that asks for the same is given
their responses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.group_progress import GroupProgress, RequestPlace, UnfinishedGroup, prompt_digest
from megarl.rollout.group_runner import Engines
from megarl.rollout.journal_records import encode_unfinished
from megarl.rollout.loop_records import EncodedLoop, LoopRecord
from megarl.rollout.prompts import Drawn
from megarl.rollout.requests import GenerateResult
from megarl.rollout.workers.messages import Answered, Asked, Ended, Frozen, SentFailure, StartGroup, ToWorker


class RemoteProgress(GroupProgress):
    """The progress of a group whose loops run in a worker. `encoded`: their records by sample, as it has sent them."""

    def __init__(self, drawn: Drawn, kept: UnfinishedGroup | None) -> None:
        super().__init__(drawn.ids, drawn.dataset, kept)
        self.encoded: dict[int, LoopRecord] = dict(self.loops)

    def begun(self) -> UnfinishedGroup:
        """See `GroupProgress.begun`."""
        return replace(super().begun(), loops=dict(self.encoded))


@dataclass(frozen=True)
class _Request:
    prompt: str  # its digest
    response: asyncio.Task[GenerateResult]


class RemoteGroup:
    """One group, from the first worker that runs it to the last.

    `ended` is what a worker says of its end, or raises what has failed there. `queued`: once rows are to be written,
    whether they are.
    """

    def __init__(
        self, group: int, drawn: Drawn, kept: UnfinishedGroup | None, engines: Engines, *,
        home: int | None, deadline: GroupDeadline | None,
    ) -> None:  # fmt: skip
        """`home` and `deadline`: those of the group's requests (`Batcher.generate`)."""
        loop = asyncio.get_running_loop()
        self.group, self._drawn, self._engines = group, drawn, engines
        self._home, self._deadline = home, deadline
        self.progress = RemoteProgress(drawn, kept)
        self.run = -1  # of the present worker; -1 while there is none
        self.worker: int | None = None
        self.lost_workers = 0
        self.ended: asyncio.Future[Ended] = loop.create_future()
        self.queued: asyncio.Future[None] = loop.create_future()
        self._requests: dict[RequestPlace, _Request] = {}
        self._renamed = 0

    def assign(self, worker: int, run: int) -> StartGroup:
        """Give the group to a worker; return the message with which it goes on from what there is."""
        self.worker, self.run = worker, run
        begun = self.progress.begun()
        # It has to know the turns that have ended. The others it asks for, and gets their tokens when they end.
        ended = {place: each for place, each in begun.responses.items() if each.tokens.finish_reason is not None}
        kept = replace(begun, responses=ended)
        record = encode_unfinished(self.group, kept, "") if ended or kept.loops else None
        left_s = None if self._deadline is None else max(0.0, self._deadline.at - time.monotonic())
        return StartGroup(run, self.group, self._drawn, record, left_s)

    def take_away(self) -> None:
        """Note that the worker is lost."""
        self.worker, self.run = None, -1
        self.lost_workers += 1

    def freeze(self, message: Frozen) -> None:
        """Keep the records of a loop."""
        encoded = self.progress.encoded
        if message.sample not in encoded or message.version > encoded[message.sample].version:
            encoded[message.sample] = EncodedLoop(message.version, message.text)

    def ask(self, message: Asked, send: Callable[[ToWorker], None]) -> None:
        """Have engines answer a request, or take the answer that is on its way, or there, for an earlier worker."""
        digest = prompt_digest(message.request.prompt_ids)
        found = self._requests.get(message.place)
        if found is None or found.prompt != digest:
            found = self._requests[message.place] = _Request(digest, self._begin(message, again=found is not None))
        found.response.add_done_callback(partial(self._answer, message, send))

    def _begin(self, message: Asked, *, again: bool) -> asyncio.Task[GenerateResult]:
        request = message.request
        if again:  # an engine may still work on the earlier one, which had another prompt
            self._renamed += 1
            request = replace(request, request_id=f"{request.request_id}.{self._renamed}")
        self.progress.begin(request, message.place)
        sample, turn = message.place
        prefix = self.group if turn == 0 else (self.group, sample)
        response = self._engines.generate(
            request, prefix, self._home, self._deadline, self.progress.tokens, near=message.near if turn else None
        )
        return asyncio.get_running_loop().create_task(_result(response))

    def _answer(self, message: Asked, send: Callable[[ToWorker], None], response: asyncio.Task[GenerateResult]) -> None:
        if response.cancelled():
            return
        error = response.exception()
        if message.run != self.run:
            return
        failure = None if error is None else SentFailure.of(error)
        send(Answered(message.run, message.place, None if failure is not None else response.result(), failure))

    def close(self) -> None:
        """Wait for nothing more."""
        for each in self._requests.values():
            each.response.cancel()
        for future in (self.ended, self.queued):
            if not future.done():
                future.cancel()
            elif not future.cancelled():
                future.exception()  # nobody has to ask for it any more


async def _result(response: Awaitable[GenerateResult]) -> GenerateResult:
    return await response
