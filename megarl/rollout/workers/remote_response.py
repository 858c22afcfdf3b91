"""The controller's part of a response of an evaluation whose loop a worker runs."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from megarl.rollout.agents.eval_context import eval_drawn, eval_group, eval_request_context
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import Generate
from megarl.rollout.engine.response_parts import ResponsePart
from megarl.rollout.tasks.eval_sets import EvalTask
from megarl.rollout.workers.messages import Asked, StartResponse, ToWorker
from megarl.rollout.workers.remote_run import RemoteProgress, RemoteRun


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
