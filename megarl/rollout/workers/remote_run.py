"""The controller's part of the loops that a worker runs: their requests, their tokens, their records.

All of it stays when the worker dies. Requests that are open go on, and another worker that asks for the same is given
their responses.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megarl.config.schema import Config
from megarl.rollout.agents.eval_context import eval_drawn, eval_group, eval_request_context
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import Generate, RequestContext
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.resume.group_progress import GroupProgress, RequestPlace, UnfinishedGroup
from megarl.rollout.resume.journal_records import encode_unfinished
from megarl.rollout.resume.loop_records import EncodedLoop, LoopRecord
from megarl.rollout.tasks.eval_sets import EvalTask
from megarl.rollout.tasks.prompts import PromptTask
from megarl.rollout.workers.messages import Answered, Asked, Frozen, SentFailure, StartGroup, StartResponse, ToWorker


class RemoteProgress(GroupProgress):
    """The progress of loops that run in a worker. `encoded`: their records by sample, as it has sent them."""

    def __init__(self, drawn: PromptTask, kept: UnfinishedGroup | None) -> None:
        super().__init__(drawn.ids, drawn.dataset, kept)
        self.encoded: dict[int, LoopRecord] = dict(self.loops)

    def begun(self) -> UnfinishedGroup:
        """See `GroupProgress.begun`."""
        return replace(super().begun(), loops=dict(self.encoded))


@dataclass(frozen=True)
class _Request:
    prompt: str  # its digest
    response: asyncio.Task[GenerateResult]


class RemoteRun(ABC):
    """The loops of one group, or of one response of an evaluation, from the first worker that runs them to the last.

    `name`: what they are called in messages; `loops`: their number. `ended` is what a worker says of their end, or
    raises what has failed there.
    """

    def __init__(self, name: str, number: int, loops: int, progress: RemoteProgress) -> None:
        """`number`: the group's, in the record with which another worker goes on."""
        self.name, self.loops, self.progress = name, loops, progress
        self._number = number
        self.run = -1  # of the present worker; -1 while there is none
        self.worker: int | None = None
        self.lost_workers = 0
        self.ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests: dict[RequestPlace, _Request] = {}
        self._renamed = 0

    @abstractmethod
    def start(self, run: int, kept: bytes | None) -> ToWorker:
        """Return the message with which a worker begins, or goes on from what is `kept`."""

    @abstractmethod
    def request(self, request: GenerateRequest, message: Asked) -> Coroutine[Any, Any, GenerateResult]:
        """Have engines answer a request of the loops."""

    @abstractmethod
    async def persist(self) -> None:
        """Return when the records are where they have to be before a call that must not be repeated."""

    def assign(self, worker: int, run: int) -> ToWorker:
        """Give the loops to a worker; return the message with which it goes on from what there is."""
        self.worker, self.run = worker, run
        begun = self.progress.begun()
        # It has to know the turns that have ended. The others it asks for, and gets their tokens when they end.
        ended = {place: each for place, each in begun.responses.items() if each.tokens.finish_reason is not None}
        kept = replace(begun, responses=ended)
        return self.start(run, encode_unfinished(self._number, kept, "") if ended or kept.loops else None)

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
        digest = message.prompt
        found = self._requests.get(message.place)
        if found is None or found.prompt != digest:
            found = self._requests[message.place] = _Request(digest, self._begin(message, again=found is not None))
        found.response.add_done_callback(partial(self._answer, message, send))

    def _begin(self, message: Asked, *, again: bool) -> asyncio.Task[GenerateResult]:
        request = message.request
        if again:  # an engine may still work on the earlier one, which had another prompt
            self._renamed += 1
            request = replace(request, request_id=f"{request.request_id}.{self._renamed}")
        self.progress.begin(request, message.place, message.prompt)
        return asyncio.get_running_loop().create_task(self.request(request, message))

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
        close_future(self.ended)


def close_future(future: asyncio.Future[Any]) -> None:
    """Give up a future for which nobody waits any more, whatever it has come to."""
    if not future.done():
        future.cancel()
    elif not future.cancelled():
        future.exception()  # nobody has to ask for it any more


# The controller's part of a group that a worker runs.


class RemoteGroup(RemoteRun):
    """One group, from the first worker to the last. `queued`: once rows are to be written, whether they are."""

    def __init__(
        self, group: int, drawn: PromptTask, kept: UnfinishedGroup | None, deadline: GroupDeadline | None, *,
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


# The controller's part of a response of an evaluation whose loop a worker runs.


class RemoteResponse(RemoteRun):
    """One response, from the first worker that runs its loop to the last; it ends with the evaluation."""

    def __init__(self, task: EvalTask, generate: Generate) -> None:
        """`generate`: the evaluation's way to the engines, which admits its requests."""
        place = task.place
        name = f"the {place.mode} response {place.sample} to problem {place.index} of {task.chosen.name}"
        super().__init__(name, eval_group(task), 1, RemoteProgress(eval_drawn(task), None))
        self._task, self._generate = task, generate

    def start(self, run: int, kept: bytes | None) -> ToWorker:
        """See `RemoteRun.start`."""
        return StartResponse(run, self._task.sent(), kept)

    def request(self, request: GenerateRequest, message: Asked) -> Coroutine[Any, Any, GenerateResult]:
        """See `RemoteRun.request`."""
        return self._request(request, message)

    async def _request(self, request: GenerateRequest, message: Asked) -> GenerateResult:
        context = eval_request_context(self._task, message.place[1], message.near)
        result = await self._generate(request, context)
        # Requests of several responses share a call, which therefore keeps nothing: another worker needs ended turns.
        self.progress.tokens[request.request_id] = ResponsePart(
            result.response_ids, result.logprobs, result.versions, result.finish_reason
        )
        return result

    async def persist(self) -> None:
        """See `RemoteRun.persist`: they are here, and a resumed run begins the evaluation anew."""
