"""The agent loop's interface and its context, which counts, limits and records requests and calls."""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import msgspec

from megarl.chat.images import check_image
from megarl.common.errors import RolloutError, ToolFailed, TrajectoryFull
from megarl.common.values import changed
from megarl.config.schema.agent import LOOP_TURNS
from megarl.queue.images import ImageRef
from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardResult, Turn
from megarl.rewards.worker_pool import RewardPool
from megarl.rollout.agents.batch_stats import BatchStats, TrajectoryTimes
from megarl.rollout.agents.loop_run import LoopRun
from megarl.rollout.agents.trajectory_builder import defect
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult, request_seed
from megarl.rollout.resume.group_progress import (
    INTERRUPTED,
    CallRecord,
    FrozenLoop,
    call_digest,
    prompt_digest,
)
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.rollout.transport.gather import BatchDecoder
from megarl.telemetry.trace import events
from megarl.tools.tool import Tool, ToolAnswer

LoopState = TypeVar("LoopState")

MOST_NAME_CHARACTERS = 64  # of a tool's name in an event
GRACE_S = 90.0  # a call is abandoned this long after its time limit; a tool may queue calls first
FROZEN_BYTES = 8 << 20  # of a loop's state, as JSON


@dataclass(frozen=True)
class _Shown:
    """Tool images shown in a sequence up to token `end`; `digest`: of these tokens."""

    end: int
    digest: str
    images: tuple[ImageRef, ...]
    files: tuple[bytes, ...]


class AgentContext:
    """One sample of a prompt group, and the services its loop may use."""

    def __init__(
        self, run: LoopRun, sample_index: int, toolbox: Toolbox | None, rewards: RewardPool, decoder: BatchDecoder
    ) -> None:
        self.prompt, self.group_id, self.sample_index = run.job.prompt, run.job.group, sample_index
        self._run, self._progress, self._toolbox = run, run.progress, toolbox
        self._rewards, self._decoder = rewards, decoder
        self._requests = self._calls = 0
        self._replica: int | None = None  # of the last response
        self._results: dict[int, GenerateResult] = {}  # of this attempt
        self._shown: list[_Shown] = []
        self._answered_with = 0  # images
        self.times = TrajectoryTimes(self.group_id, sample_index, time.monotonic())

    @property
    def place(self) -> tuple[int, int]:
        """The group and the index of the sample."""
        return self.group_id, self.sample_index

    @property
    def stats(self) -> BatchStats:
        """The measurements to add to."""
        return self._run.stats

    @property
    def deadline(self) -> GroupDeadline | None:
        """The time by which the group's responses, and then its loops, must end; None if there is none."""
        return self._run.deadline

    @property
    def trains(self) -> bool:
        """True for a sample of the run's groups, False for an evaluation response."""
        return self._run.job.evaluated is None

    @property
    def seed(self) -> int | None:
        """The seed of the sample's first request; None for a greedy response."""
        return self._run.job.seed_of(self.sample_index, 0)

    @property
    def turns(self) -> int:
        """The number of requests the loop has made."""
        return self._requests

    @cached_property
    def rng(self) -> random.Random:
        """A generator seeded with the run's seed, the group and the sample; loops using only this are reproducible."""
        return random.Random(request_seed(self._run.job.seed, self.group_id, self.sample_index))

    @property
    def toolbox(self) -> Toolbox:
        """The tools, dialogue and limits of the prompt's data set. Raises RolloutError for `single_turn`."""
        if self._toolbox is None:
            raise RolloutError("agent.loop: single_turn has no toolbox; name the loop that needs it in the config")
        return self._toolbox

    async def generate(
        self, token_ids: Sequence[int], *, max_tokens: int | None = None, known: int = 0
    ) -> GenerateResult:
        """Sample the model's continuation of `token_ids` with the sampling of the prompt's set.

        If the replica is lost, another continues the response. A resumed run continues it from its tokens. A sample's
        turns stay on the replica that has their prefix in its cache. `known`: how many of the first tokens need no
        experts (`Routes`), because earlier turns' results have them.

        Raises TrajectoryFull if `token_ids` leave no room for a response, and beyond `agent.max_turns`; if the loop
        does not catch it, only its sample fails. Raises RequestFailed if an engine refuses the request. Raises
        RolloutError if no replica is left, none has room within `timeouts.generate_s`, or the group fails at its
        deadline.
        """
        self._check_room(token_ids)
        turn, self._requests = self._requests, self._requests + 1
        request = self._request(token_ids, turn, known)
        if max_tokens is not None and max_tokens < request.sampling.max_tokens:
            request = changed(request, sampling=changed(request.sampling, max_tokens=max_tokens))
        self._progress.begin(request, (self.sample_index, turn))
        begin = time.monotonic()
        result = self._results[turn] = await self._run.generate(request, (self.sample_index, turn), self._replica)
        stats = self.stats
        stats.generate_seconds.append(result.seconds)
        stats.continued += result.lost_replicas > 0
        stats.cut += result.cut
        self._note_turn(turn, result, begin)
        self._replica = result.replica if result.replica >= 0 else self._replica
        return result

    def _request(self, token_ids: Sequence[int], turn: int, known: int) -> GenerateRequest:
        """Return request number `turn` with the sampling of the prompt's set."""
        job = self._run.job
        images, files = self._images_in(token_ids)
        return GenerateRequest(
            request_id=f"{job.name}-{self.sample_index}-{turn}",
            prompt_ids=list(token_ids),
            sampling=self.prompt.sampling,
            seed=job.seed_of(self.sample_index, turn),
            priority=0 if job.evaluated is None else job.evaluated.priority,
            images=images,
            files=files if any(files) else (),
            routes_from=known if self.trains else None,
        )

    def show(self, before: Sequence[int], token_ids: Sequence[int], images: Sequence[bytes]) -> list[int]:
        """Return `token_ids`, which follow `before`, with each image placeholder expanded to the image's tokens.

        `token_ids` has one placeholder per image, as `Dialogue.next_turn` makes from `chat.images.shown_text`. Requests
        and trajectories that begin with these tokens carry the images. Raises ValueError if the number of images
        differs.
        """
        if not images:
            return list(token_ids)
        shows = self.toolbox.images
        if shows is None:
            raise ValueError("the model sees no images")
        name = f"the answer of a tool in sample {self.group_id}:{self.sample_index}"
        ids, refs = shows.placed(token_ids, images, name, len(before))
        whole = [*before, *ids]
        self._shown.append(_Shown(len(whole), prompt_digest(whole), refs, tuple(images)))
        return ids

    def _images_in(self, token_ids: Sequence[int]) -> tuple[tuple[ImageRef, ...], tuple[bytes, ...]]:
        """Return a sequence's images and their files; only tool images have a non-empty file."""
        images = self.prompt.images_in(token_ids)
        files = (b"",) * len(images)
        for shown in self._shown:
            if shown.end <= len(token_ids) and prompt_digest(token_ids[: shown.end]) == shown.digest:
                images, files = images + shown.images, files + shown.files
        return images, files

    def with_images(self, row: Trajectory) -> Trajectory:
        """Return a trajectory with its prompt's and tools' images.

        Raises RolloutError if the loop changed the prompt's tokens.
        """
        if row.images or not row.prompt_ids:
            return row
        images, files = self._images_in([*row.prompt_ids, *row.response_ids])
        own = {image.hash: file for image, file in zip(images, files, strict=True) if file}
        return replace(row, images=images, files=own) if images else row

    def _check_room(self, token_ids: Sequence[int]) -> None:
        if self._toolbox is None:  # a single response; its prompt was checked
            return
        most, turns = self._toolbox.max_model_len, self._toolbox.bounds.max_turns or LOOP_TURNS
        if most is not None and len(token_ids) >= most:
            message = f"the prompt of request {self._requests} of sample {self.group_id}:{self.sample_index} has"
            raise TrajectoryFull(f"{message} {len(token_ids)} tokens; with one of a response it may have {most}")
        if self._requests >= turns:
            message = f"sample {self.group_id}:{self.sample_index} has made {turns} requests"
            raise TrajectoryFull(f"{message}, and may make no more (agent.max_turns)")

    def _note_turn(self, turn: int, result: GenerateResult, begin: float) -> None:
        end = time.monotonic()
        self.times.add_turn(result, end - begin)
        if self.trains:
            version = result.versions[-1].version if result.versions else None
            decode_s = max(0.0, result.seconds - result.queue_s - result.prefill_s)
            events.record(
                "turn", begin, end, group=self.group_id, sample=self.sample_index,
                replica=result.replica, version=version, args={
                    "turn": turn, "tokens": len(result.response_ids),
                    "queue_s": round(max(0.0, end - begin - result.seconds) + result.queue_s, 4),
                    "prefill_s": round(result.prefill_s, 4), "decode_s": round(decode_s, 4),
                },
            )  # fmt: skip

    def finished(self, turn: int) -> GenerateResult:
        """Return the result of request `turn` of this sample, from this attempt or an earlier one.

        Raises RolloutError if it has not finished.
        """
        if turn in self._results:
            return self._results[turn]
        part = self._progress.finished((self.sample_index, turn))
        if part is None or part.finish_reason is None:
            name = f"{self.group_id}:{self.sample_index}"
            raise RolloutError(f"sample {name} should continue after turn {turn}, whose response was not kept")
        ids, logprobs = part.response_ids, part.logprobs
        versions, end, routes = part.versions, part.finish_reason, part.routes
        return GenerateResult(f"turn {turn}", ids, logprobs, versions, end, -1, routes=routes)

    @property
    def _loop(self) -> FrozenLoop:
        return self._progress.loops.get(self.sample_index) or FrozenLoop()

    def freeze(self, state: object) -> None:
        """Keep the loop's state: a dataclass that msgspec can write as JSON.

        A resumed run restarts the loop, `frozen` returns this state, and requests and calls count from here. A loop
        that freezes nothing starts over and gets the same responses and answers to the same requests. After an answer
        with images nothing is frozen.

        Raises ValueError for a state of more than 8 MiB, and TypeError for one that msgspec cannot write.
        """
        if self._answered_with:  # the journal keeps no images of open loops, so a resume calls the tools again
            return
        content = msgspec.json.encode(state)
        if len(content) > FROZEN_BYTES:
            raise ValueError(
                f"the state that the loop of sample {self.group_id}:{self.sample_index} freezes has {len(content)} "
                f"bytes of JSON; {FROZEN_BYTES} at most, because each change of it is sent and written"
            )
        text = content.decode()
        self._progress.record(self.sample_index, self._loop.freeze(text, self._requests, self._calls))

    def frozen(self, kind: type[LoopState]) -> LoopState | None:
        """Return the state the loop last froze in an earlier attempt; None in the first.

        Raises RolloutError if the state belongs to another loop.
        """
        loop = self._loop
        if not loop.state:
            return None
        try:
            state = msgspec.json.decode(loop.state, type=kind)
        except msgspec.MsgspecError as error:
            raise RolloutError(f"the frozen state of a loop is not a {kind.__name__}: {error}") from error
        self._requests, self._calls = loop.requests, loop.begun_calls
        return state

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call a tool; its answer has at most `agent.max_tool_output_chars`.

        The answer is an error if the name is unknown, if `agent.max_tool_calls`, `max_tool_seconds` or `tool_timeout_s`
        is exceeded, or if an earlier attempt began the call and it is not idempotent. A call answered in an earlier
        attempt is not repeated unless its answer had images, which are not kept. Raises RolloutError if the tool itself
        fails, or if the call cannot be recorded first.
        """
        number, self._calls = self._calls, self._calls + 1
        digest = call_digest(tool, arguments)
        known, found = self._loop.known(number, digest), self.toolbox.tools.get(tool)
        if known is not None and known.text is not None:
            return ToolAnswer(known.text, known.error)
        if known is not None and found is not None and not found.idempotent:
            return self._answered(number, CallRecord(digest, INTERRUPTED, error=True))
        if found is None:
            names = ", ".join(self.toolbox.tools) or "none"
            return self._answered(number, CallRecord(digest, f"there is no tool {tool!r}; there are: {names}", True))
        if reason := self._used_up(number):
            return self._answered(number, CallRecord(digest, reason, error=True))
        self._record(number, CallRecord(digest))
        if not found.idempotent:
            await self._run.persist()
        started = time.monotonic()
        answer = await self._seen(await self._timed(found, arguments, self._left_s()), tool)
        ended = time.monotonic()
        seconds = ended - started
        self.times.tool_s += seconds
        if self.trains:
            events.record(
                "tool", started, ended, group=self.group_id, sample=self.sample_index,
                args={"tool": tool[:MOST_NAME_CHARACTERS], "error": int(answer.error)},
            )  # fmt: skip
        return self._answered(number, CallRecord(digest, answer.text, answer.error, seconds), answer.images)

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardResult | None:
        """Score a response with the reward function; return None if the response failed.

        Evaluations also score failed responses, but count them as failed. `turns`: the whole trajectory, for functions
        that use it.
        """
        if defect(result):
            return None
        _, outcome = await self._judged(result, turns)
        return outcome

    async def _judged(self, result: GenerateResult, turns: Sequence[Turn]) -> tuple[str, RewardResult]:
        """Return the text of a response and its reward."""
        text = await self._decoder.text(result.response_ids)
        started = time.monotonic()
        reward_input = self.prompt.reward_input(text, result.response_ids, result.finish_reason)
        if turns:
            reward_input = changed(reward_input, turns=tuple(turns))
        outcome: RewardResult = await self._rewards.score(reward_input, self.prompt.reward)
        stats, ended = self.stats, time.monotonic()
        stats.reward_seconds.append(ended - started)
        self.times.reward_s += ended - started
        if self.trains:
            events.record(
                "reward", started, ended, group=self.group_id, sample=self.sample_index,
                args={"error": int(outcome.error is not None)},
            )  # fmt: skip
        if outcome.error is not None:
            stats.reward_errors[outcome.reason or "error"] += 1  # the pool reports them
        stats.rewards_redone += outcome.redone
        return text, outcome

    def note_times(self) -> None:
        """Record where the sample's time went; called at its end."""
        times, now = self.times, time.monotonic()
        times.end(now, time.time())
        self.stats.note_times(times)
        events.record(
            "trajectory", times.began, now, group=self.group_id, sample=self.sample_index, replica=times.replica,
            args=times.args(),
        )  # fmt: skip

    def note_end(self, turns: int, malformed: int = 0, overflow: bool = False) -> None:
        """Record a loop's turns, malformed calls, and whether an answer did not fit; called at its end."""
        self.stats.turns.append(turns)
        self.stats.malformed_calls += malformed
        self.stats.overflows += overflow

    def _used_up(self, number: int) -> str:
        bounds = self.toolbox.bounds
        if number >= bounds.max_tool_calls:
            return f"no call is left of {bounds.max_tool_calls}; answer without a tool"
        if self._left_s() <= 0:
            return "no time is left for tools; answer without one"
        return ""

    def _left_s(self) -> float:
        """Return how many seconds a call may take now."""
        bounds = self.toolbox.bounds
        left = bounds.max_tool_seconds - sum(call.seconds for call in self._loop.calls.values())
        if self.deadline is not None:
            left = min(left, self.deadline.at - time.monotonic())
        return min(left, bounds.tool_timeout_s)

    async def _timed(self, tool: Tool, arguments: Mapping[str, Any], limit_s: float) -> ToolAnswer:
        try:
            async with asyncio.timeout(limit_s + GRACE_S) as limit:
                answer: object = await tool.call(arguments, timeout_s=limit_s)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return ToolAnswer(f"the tool has not answered within {limit_s:.3g} s", error=True)
            raise ToolFailed(f"the tool {tool.name!r} failed: {type(error).__name__}: {error}") from error
        if not isinstance(answer, ToolAnswer):
            raise ToolFailed(f"the tool {tool.name!r} has to return a ToolAnswer, not {type(answer).__name__}")
        return answer

    async def _seen(self, answer: ToolAnswer, tool: str) -> ToolAnswer:
        """Return the answer if the model can see its images, else an error that says why not."""
        if not answer.images:
            return answer
        shows = self.toolbox.images
        if shows is None:
            raise ToolFailed(f"the tool {tool!r} answers with images, and the model sees none")
        before = len(self.prompt.images) + self._answered_with
        if before + len(answer.images) > shows.most:
            bound = f"{before} of {shows.most} (model.vision.images_per_prompt) are there"
            return ToolAnswer(f"no room for {len(answer.images)} images: {bound}", error=True)
        self._answered_with += len(answer.images)  # before the await, which lets other calls run
        try:
            for each in answer.images:
                await asyncio.to_thread(check_image, each, decode=True)
        except ValueError as error:
            self._answered_with -= len(answer.images)
            return ToolAnswer(f"an image of the answer cannot be used: {error}", error=True)
        return answer

    def _answered(self, number: int, call: CallRecord, images: tuple[bytes, ...] = ()) -> ToolAnswer:
        assert call.text is not None
        text = self.toolbox.shortened(call.text)  # errors too, because they repeat the model's text
        self._record(number, changed(call, text=None if images else text))
        self.stats.tool_calls += 1
        self.stats.tool_errors += call.error
        if call.seconds:  # otherwise it was not made
            self.stats.tool_seconds.append(call.seconds)
        return ToolAnswer(text, call.error, images)

    def _record(self, number: int, call: CallRecord) -> None:
        self._progress.record(self.sample_index, self._loop.record(number, call))


class AgentLoop(Protocol):
    """Turns a prompt into trajectories. One object runs all samples at once: keep a sample's state inside `run`."""

    async def run(self, ctx: AgentContext) -> Trajectory | Sequence[Trajectory]:
        """Generate, act and judge. Token ids must be exactly those the engine received and produced.

        Several trajectories, such as the paths of a branching dialogue, are parts of one sample: they share its reward,
        status and advantage. Each must have a token the model sampled.
        """
        ...
