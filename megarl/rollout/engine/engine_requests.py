"""The requests of one vLLM engine: started, reported part by part, ended.

Nothing is done per token. vLLM keeps the tokens of an unfinished request in its front end, in this process. They are
copied out only when a report is due.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.common.errors import ReplicaFailed, RequestFailed
from megarl.common.values import changed
from megarl.queue.routes import Routes
from megarl.queue.trajectory import FinishReason, VersionSpan
from megarl.rollout.engine.engine_load import EngineMonitor
from megarl.rollout.engine.messages import GenerateRequest
from megarl.rollout.engine.response_parts import ResponsePart

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, WeightVersionSpan
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState

    from megarl.rollout.engine.image_inputs import ImageInputs


SCHEDULED = 2  # vllm.v1.engine.EngineCoreEventType.SCHEDULED


@dataclass
class _Times:
    arrived: float
    scheduled: float | None = None
    first_token: float | None = None


class RequestTimes:
    """When an engine scheduled each request and made its first token, in seconds of the host's monotonic clock.

    vLLM sends the scheduling time with the first token if it keeps statistics in the engine process. The front end's
    statistics, which cost time for each token, stay off: the hook looks at one field of each output.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._open: dict[str, _Times] = {}

    def begin(self, name: str, arrived: float) -> None:
        """Record a new request."""
        self._open[name] = _Times(arrived)

    def end(self, name: str) -> None:
        """Forget a request."""
        self._open.pop(name, None)

    def hear(self, name: str, output: EngineCoreOutput, at: float | None) -> None:
        """Record an engine output with events of its request. `at`: when the engine sent it."""
        times = self._open.get(name)
        if times is None or times.first_token is not None:
            return
        for event in output.events or ():
            if event.type == SCHEDULED and times.scheduled is None:
                times.scheduled = event.timestamp
        if output.new_token_ids and times.scheduled is not None:
            times.first_token = self._now() if at is None else at

    def parts(self, name: str, *, ended: bool) -> tuple[float, float]:
        """Return the seconds that a request spent in the engine's queue and in prefill so far.

        It counts as queued until the engine reports it. If it `ended` unreported, both are 0.
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
        """Make the engine's front end report outputs that have events."""
        processor: Any = engine.output_processor
        before = processor._update_stats_from_output

        def observed(state: RequestState, output: EngineCoreOutput, at: float | None, stats: object) -> None:
            if output.events:
                self.hear(state.external_req_id, output, at)
            before(state, output, at, stats)

        processor._update_stats_from_output = observed


SLEEPING_PARTS = ("weights", "kv_cache")  # vLLM's tags


class WeightState:
    """Decides whether an engine may generate with its weights. Record begins before, and ends after they happen. Pure.

    During a weight sync the weights are of two versions. If another member's failure interrupts the sync, they stay so
    until a later sync has loaded all of them. The engine stays paused and keeps its requests; nothing may resume or
    reset it before that.

    A sleeping engine has lost its weights. It wakes part by part, and the last part resumes it, whatever paused it
    before (vLLM 0.32, v1/engine/core.py:1012). So the cache must not wake before a sync has loaded all weights.
    """

    def __init__(self, has_weights: bool) -> None:
        """`has_weights`: the engine read the model's files instead of starting with random weights."""
        self.has_weights = has_weights
        self._joining = False  # the sync group; after a failure the engine may still wait for the other members
        self.in_session = False
        self._loading = False  # in this session
        self._mixed = False  # since an interrupted session
        self.asleep: frozenset[str] = frozenset()  # of SLEEPING_PARTS
        self._falling = False  # falling asleep: it may still hold memory

    @property
    def obstacle(self) -> str | None:
        """The reason why the engine must not generate, missing weights aside; None if there is none."""
        if self.in_session or self._joining:
            return "was left in the middle of a weight sync"
        if self._mixed:
            return "holds weights of two versions since an interrupted weight sync"
        return None

    def sleep(self) -> None:
        """Record that the engine is about to sleep and lose its weights and cache."""
        self.has_weights, self.asleep, self._falling = False, frozenset(SLEEPING_PARTS), True

    def slept(self) -> None:
        """Record that the engine has freed its memory."""
        self._falling = False

    @property
    def sleeps(self) -> bool:
        """Whether the engine holds no memory of any part."""
        return self.asleep == frozenset(SLEEPING_PARTS) and not self._falling

    def obstacle_to_wake(self, part: str) -> str | None:
        """The reason why the engine must not get the memory of `part` back, or None."""
        if part == "weights":
            return None if self.asleep and not self._falling else "was not put to sleep before a publication"
        return self.obstacle or (None if self.has_weights else "has had no weights since it slept")

    def woke(self, part: str) -> None:
        """Record that a part has its memory again."""
        self.asleep -= {part}

    def join(self) -> None:
        """Record that the engine is about to join the group of a sync."""
        self._joining = True

    def joined(self) -> None:
        """Record that the engine has joined the group."""
        self._joining = False

    def begin(self) -> None:
        """Record that a session is about to begin."""
        self.in_session, self._loading = True, False

    def receive(self) -> None:
        """Record that new weights are about to replace those of the model."""
        self._loading = True

    def abandoned(self) -> None:
        """Record that the session was abandoned."""
        self._mixed |= self._loading
        self.in_session = self._loading = False

    def finished(self) -> None:
        """Record that the engine has loaded all weights of a new version."""
        self._mixed, self.has_weights = False, True
        self.in_session = self._loading = False


UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class _Open:
    request: GenerateRequest
    started: float
    task: asyncio.Task[tuple[CompletionOutput, float]]


class EngineRequests:
    """Holds the requests of an engine from their start to the report of their end."""

    def __init__(
        self, engine: AsyncLLM, replica: int, monitor: EngineMonitor, silence_s: float,
        images: ImageInputs | None = None, routed: Sequence[bool] | None = None,
    ) -> None:  # fmt: skip
        """`replica`: index for errors. `silence_s`: how long an engine with requests may make no step.

        `images`: makes the inputs of prompts with images; None: the model sees none. `routed`: the layers whose
        experts the engine returns, of all; None: it returns none.
        """
        self._images = images
        self._layers = None if routed is None else np.flatnonzero(routed)
        self._engine, self._replica, self._monitor, self._silence_s = engine, replica, monitor, silence_s
        self._open: dict[str, _Open] = {}
        self.times = RequestTimes()
        self._weights = 0  # how often they were replaced while the engine kept its cache

    def keep_cache(self) -> None:
        """Keep later requests from using KV values cached so far; only requests in flight continue with them.

        Call it when the engine gets new weights and keeps its cache.
        """
        self._weights += 1

    def start(self, requests: Sequence[GenerateRequest]) -> None:
        """Start requests. Raises RequestFailed, and starts none, if one has the id of an open request."""
        for request in requests:
            if request.request_id in self._open:
                raise RequestFailed(f"replica {self._replica} works on request {request.request_id} already")
        for request in requests:
            now = time.monotonic()
            task = asyncio.create_task(self._generate(request, now))
            self._open[request.request_id] = _Open(request, now, task)
            self.times.begin(request.request_id, now)

    async def report(self, reported: Mapping[str, int], wait_s: float) -> dict[str, ResponsePart]:
        """Return the new tokens of each request in `reported` once all have ended, or after `wait_s`.

        `reported`: request ids and how many tokens of each are known. If the engine failed one, raises its error and
        forgets them all. Raises RequestFailed for an unknown request, ReplicaFailed if the engine is silent.
        """
        asked = [self._find(name) for name in reported]
        _, unfinished = await asyncio.wait(
            [each.task for each in asked], timeout=wait_s, return_when=asyncio.FIRST_EXCEPTION
        )
        if unfinished:
            self._check_silence(asked)
        try:
            return {name: self._part(name, known) for name, known in reported.items()}
        except BaseException:
            self._forget(reported)
            raise

    async def end(self, reported: Mapping[str, int]) -> dict[str, ResponsePart]:
        """Stop requests; return the last tokens of each, with finish reason `abort` if it had not ended.

        Raises RequestFailed for an unknown request, ReplicaFailed if the engine is silent.
        """
        await asyncio.sleep(0)  # lets requests that have just ended report it
        if open_ones := [each for each in map(self._find, reported) if not each.task.done()]:
            self._check_silence(open_ones)
        parts = {}
        for name, known in reported.items():
            part = self._part(name, known)
            parts[name] = part if part.finish_reason is not None else replace(part, finish_reason="abort")
        self._forget(reported)
        return parts

    def _check_silence(self, waiting: Sequence[_Open]) -> None:
        """Raise ReplicaFailed if the engine has made no step for too long since the first of `waiting` arrived."""
        silent_s = self._monitor.silent_s(min(each.started for each in waiting))
        if silent_s > self._silence_s:
            raise ReplicaFailed(
                self._replica,
                f"the engine of replica {self._replica} has made no step for {silent_s:.0f} s; "
                f"{len(self._open)} requests wait for it",
            )

    def drop(self) -> None:
        """Forget all requests."""
        self._forget(list(self._open))

    def _find(self, name: str) -> _Open:
        if name not in self._open:
            raise RequestFailed(f"replica {self._replica} does not know request {name}")
        return self._open[name]

    def _forget(self, names: Iterable[str]) -> None:
        """Close requests; vLLM aborts those whose task is cancelled."""
        for name in names:
            if (found := self._open.pop(name, None)) is None:
                continue
            self.times.end(name)
            if not found.task.cancel() and not found.task.cancelled():
                found.task.exception()  # another request of the call has raised its error

    def _part(self, name: str, known: int) -> ResponsePart:
        """Return the tokens from number `known` on; close a request that has ended."""
        found = self._find(name)
        times = self.times.parts(name, ended=found.task.done())
        routed = self._layers is not None and found.request.routes_from is not None
        if found.task.done():
            del self._open[name]
            self.times.end(name)
            output, seconds = found.task.result()
            end: FinishReason = output.finish_reason if output.finish_reason in {"stop", "length"} else "abort"
            spans = output.weight_versions or ()
            part = self._read(name, output.token_ids, output.logprobs, spans, known, end, seconds, times)
            if not routed or output.routed_experts is None:
                return part
            return self._with_routes(part, [output.routed_experts], found.request, known)
        seconds = time.monotonic() - found.started
        processor = self._engine.output_processor
        for internal_id in processor.external_req_ids.get(name, ()):
            state = processor.request_states[internal_id]
            ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs
            spans = state._weight_version_spans() or ()
            part = self._read(name, ids, logprobs, spans, known, None, seconds, times)
            if not routed:
                return part
            return self._with_routes(part, state.routed_experts_chunks, found.request, known)
        # It has not reached the engine yet, or has just ended; the next report includes it.
        return ResponsePart(seconds=seconds, queue_s=times[0], prefill_s=times[1])

    def _read(
        self, name: str, ids: Sequence[int], logprobs: FlatLogprobs, spans: Sequence[WeightVersionSpan],
        known: int, end: FinishReason | None, seconds: float, times: tuple[float, float],
    ) -> ResponsePart:  # fmt: skip
        """Return the tokens from `known` on. Raises ReplicaFailed unless there is one log-prob per token."""
        new = list(ids[known:])
        if list(logprobs.token_ids[known:]) != new:
            given = len(logprobs.token_ids)
            raise ReplicaFailed(
                self._replica, f"replica {self._replica} gave {given} log-probs for {len(ids)} tokens of {name}"
            )
        values = [math.nan if value is None else float(value) for value in logprobs.logprobs[known:]]
        versions = tuple(
            VersionSpan(_version(span.version), max(span.start - known, 0), span.end - known, replica=self._replica)
            for span in spans
            if span.end > known
        )
        queue_s, prefill_s = min(times[0], seconds), times[1]
        return ResponsePart(new, values, versions, end, seconds, queue_s, min(prefill_s, seconds - queue_s))

    def _with_routes(
        self, part: ResponsePart, experts: Sequence[np.ndarray], request: GenerateRequest, known: int
    ) -> ResponsePart:
        """Return the part with its new experts; `experts`: [tokens, all layers, K] since the start.

        The engine may have returned fewer; they are counted once the response is complete.
        """
        if not part.response_ids or not experts:
            return part
        read = len(request.prompt_ids) + known - 1 - (request.routes_from or 0)
        begin, end = read if known else 0, read + len(part.response_ids)
        return changed(part, routes=Routes(np.concatenate(experts)[begin:end, self._layers]))

    async def _generate(self, request: GenerateRequest, started: float) -> tuple[CompletionOutput, float]:
        """Return the whole response, and the seconds since `started`."""
        final = None
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
        if request.images:
            if self._images is None:
                raise RequestFailed(f"request {request.request_id} has images, and the model has no vision tower")
            prompt = await self._images.of(request)
        # vLLM shares the cached values of a prefix among requests of the same salt.
        if self._weights:
            prompt["cache_salt"] = str(self._weights)
        outputs = self._engine.generate(
            prompt, _parameters(request), request_id=request.request_id, priority=request.priority
        )
        async for output in outputs:
            final = output
        if final is None:
            name = request.request_id
            raise ReplicaFailed(self._replica, f"replica {self._replica} ended request {name} without output")
        return final.outputs[0], time.monotonic() - started


def _parameters(request: GenerateRequest) -> SamplingParams:
    """Return vLLM's parameters: one log-prob per token, and no output before the last token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        min_p=sampling.min_p,
        ignore_eos=sampling.ignore_eos,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=request.seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        routed_experts_prompt_start=len(request.prompt_ids) if request.routes_from is None else request.routes_from,
    )


def _version(label: str) -> int:
    """Convert vLLM's weight-version label, which is "default" until the first sync."""
    return int(label) if label.isdecimal() else UNKNOWN_VERSION
