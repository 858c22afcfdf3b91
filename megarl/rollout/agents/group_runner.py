"""The group runner: runs the agent loop for each sample of a prompt group and measures it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from megarl.common.errors import RolloutError, TrajectoryFull, first_exception
from megarl.common.values import changed
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardInput, RewardOutcome, Turn
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.batch_stats import BatchStats, RunningGroups
from megarl.rollout.agents.context import LoopContext
from megarl.rollout.agents.trajectory_builder import defect, failed_trajectory, sample_rows
from megarl.rollout.engine.continuation import GroupDeadline
from megarl.rollout.engine.messages import GenerateRequest, GenerateResult
from megarl.rollout.engine.request_context import Generate, RequestContext
from megarl.rollout.engine.teachers.teacher_client import Teachers
from megarl.rollout.resume.group_progress import GroupProgress, UnfinishedGroup
from megarl.rollout.tasks.prompts import PromptTask
from megarl.rollout.tasks.toolbox import Toolbox
from megarl.rollout.transport.batch_decoder import BatchDecoder
from megarl.telemetry.trace import events

# The agent loop of demonstrations: the response is in the data, so no engine is asked and nothing is scored.


class Demonstrate:
    """Gives each sample of the group its own demonstration. The trainer learns it by the loss term `ce`."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the demonstration with the sample's number."""
        given = ctx.prompt.demonstrations[ctx.sample_index]
        return Trajectory(
            group_id=ctx.group_id,
            sample_index=ctx.sample_index,
            prompt_ids=given.prompt_ids,
            response_ids=given.response_ids,
            rollout_logprobs=[0.0] * len(given.response_ids),
            versions=(),
            finish_reason="stop",
            reward=0.0,
            demonstrated=True,
        )


LoopResult = Trajectory | Sequence[Trajectory]


class Problems(Protocol):
    """The problems of groups, and the text of responses to them (`PromptSource`)."""

    def draw(self, group_id: int) -> PromptTask:
        """Return the problem of a group."""
        ...

    @property
    def decode_all(self) -> Callable[[Sequence[Sequence[int]]], list[str]]:
        """The function that returns the texts of several sequences of tokens; any thread may call it."""
        ...


class RewardScorer(Protocol):
    """The reward functions (`RewardPool`)."""

    async def score(self, sample: RewardInput, function: int = 0) -> RewardOutcome:
        """Score one sample by the function of that number."""
        ...


class GroupRunner:
    """Turns a group's prompt into its trajectories. `groups`: those that run, with what was measured of them."""

    def __init__(
        self,
        config: Config,
        loop: AgentLoop,
        source: Problems,
        generate: Generate,
        rewards: RewardScorer,
        *,
        partition: str,
        toolboxes: Mapping[str, Toolbox] | None = None,
        decoder: BatchDecoder | None = None,
        teachers: Teachers | None = None,
        groups: RunningGroups | None = None,
    ) -> None:
        """`partition` makes the request ids of this attempt of the run unique.

        `generate`: the way to the engines. `toolboxes`: by data set, for loops that need them. `decoder`: one that
        others use too, as `groups`; default: its own. `teachers`: those that have engines; None: the run has none.
        """
        self.config = config
        self.loop = loop
        self.source = source
        self.generate = generate
        self.rewards = rewards
        self.decoder = decoder or BatchDecoder(source.decode_all, config.timeouts.rpc_s)
        self.partition = partition
        self.toolboxes = toolboxes or {}
        self.teachers = teachers
        self.groups = groups or RunningGroups()

    async def run(
        self, group_id: int, kept: UnfinishedGroup | None = None, left_s: float | None = None
    ) -> list[Trajectory]:
        """Return the group's trajectories by sample and part. Raises the exception of the first loop that fails.

        `kept`: what it had in an attempt before, which is continued. `left_s`: the seconds until its deadline if it has
        begun elsewhere; None: it begins now.
        """
        prompt = self.source.draw(group_id)
        progress = GroupProgress(prompt.ids, prompt.dataset, kept)
        with self.groups.running(group_id, progress):
            return await self._run(group_id, prompt, progress, left_s)

    async def _run(
        self, group_id: int, prompt: PromptTask, progress: GroupProgress, left_s: float | None
    ) -> list[Trajectory]:
        now = time.monotonic()
        deadline = GroupDeadline.of(self.config, now)
        if deadline is not None and left_s is not None:
            deadline = msgspec.structs.replace(deadline, at=now + left_s)
        indices = range(self.config.batch.samples_per_group)
        requests = RequestContext.of_group(self.config, group_id, deadline, progress.tokens)
        samples = [SampleContext(self, prompt, group_id, index, progress, requests) for index in indices]
        loop = Demonstrate() if prompt.demonstrations else self.loop
        results = await _ended_in_time(self._run_samples(loop, samples), loop, group_id, deadline)
        rows = [row for index, result in enumerate(results) for row in sample_rows(result, group_id, index)]
        return await self._taught(_of_set(rows, prompt.dataset), prompt.dataset)

    async def _run_samples(self, loop: AgentLoop, samples: Sequence[SampleContext]) -> list[LoopResult]:
        try:
            async with asyncio.TaskGroup() as tasks:  # the first failure cancels the others
                running = [tasks.create_task(self._run_sample(loop, sample)) for sample in samples]
        except BaseExceptionGroup as group:
            raise first_exception(group) from None
        return [task.result() for task in running]

    async def _taught(self, rows: list[Trajectory], dataset: str) -> list[Trajectory]:
        """Return a group's rows with the log-probs of the teacher, if its data set has one that has engines."""
        if self.teachers is None or not self.teachers.scores(dataset):
            return rows
        started = time.monotonic()
        rows = await self.teachers.teach(rows, dataset)
        self.groups.stats.teacher_seconds.append(time.monotonic() - started)
        return rows

    async def _run_sample(self, loop: AgentLoop, context: SampleContext) -> LoopResult:
        try:
            result = await loop.run(context)
        except TrajectoryFull as full:  # of this sample alone; those beside it may have had shorter ones
            context.note_end(context.turns, overflow=True)
            result = failed_trajectory(context.group_id, context.sample_index, str(full))
        context.note_times()
        return result


async def _ended_in_time(
    running: Coroutine[Any, Any, list[LoopResult]], loop: AgentLoop, group_id: int, deadline: GroupDeadline | None
) -> list[LoopResult]:
    """Return what the loops of a group return, which are `running`; without a deadline it waits until they end.

    Raises RolloutError, under either policy, if they have not ended within the deadline's grace, and cancels them.
    """
    if deadline is None:
        return await running
    try:
        async with asyncio.timeout(deadline.at + deadline.grace_s - time.monotonic()) as limit:
            return await running
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RolloutError(
            f"the loop {type(loop).__module__}:{type(loop).__qualname__} had not ended in all samples of group "
            f"{group_id} {deadline.grace_s:g} s after the group's deadline of {deadline.seconds:g} s "
            "(rollout.group_deadline_s); a loop has to end by `ctx.deadline`"
        ) from error


def failed_group(group_id: int, samples: int, dataset: str, reason: str) -> list[Trajectory]:
    """Return the trajectories of a group that could not be run: without tokens, counted, never trained on."""
    return _of_set([failed_trajectory(group_id, index, reason) for index in range(samples)], dataset)


def _of_set(rows: list[Trajectory], dataset: str) -> list[Trajectory]:
    """Return the trajectories with the name of their data set; there is none if the run has only one."""
    return [replace(row, dataset=dataset) for row in rows] if dataset else rows


class SampleContext(LoopContext):
    """Implements `AgentContext` for one sample of a group that `runner` runs."""

    def __init__(
        self, runner: GroupRunner, prompt: PromptTask, group_id: int, sample_index: int, progress: GroupProgress,
        requests: RequestContext,
    ) -> None:  # fmt: skip
        """`requests`: the context of those of the group."""
        toolbox = runner.toolboxes.get(prompt.dataset)
        super().__init__(prompt, group_id, sample_index, progress, toolbox)
        self._runner, self._group_requests = runner, requests

    @property
    def run_seed(self) -> int:
        """See `LoopContext.run_seed`."""
        return self._runner.config.run.seed

    @property
    def stats(self) -> BatchStats:
        """See `LoopContext.stats`."""
        return self._runner.groups.stats

    @property
    def _deadline(self) -> GroupDeadline | None:
        return self._group_requests.deadline

    async def _persist(self) -> None:
        await self._runner.groups.persist(self.group_id)

    def note_times(self) -> None:
        """Take note of where the time of the sample went, at its end."""
        now = time.monotonic()
        times = self.times.end(self.group_id, self.sample_index, now, time.time())
        self.stats.note_times(times)
        events.record(
            "trajectory", self.times.began, now, group=self.group_id, sample=self.sample_index, replica=times.replica,
            args=times.args(),
        )  # fmt: skip

    def _request(self, token_ids: Sequence[int], turn: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{self._runner.partition}-{self.group_id}-{self.sample_index}-{turn}",
            prompt_ids=list(token_ids),
            sampling=self.prompt.sampling,
            seed=self._seed(turn),
        )

    async def _respond(self, request: GenerateRequest, turn: int) -> GenerateResult:
        context = self._group_requests.of_turn(self.sample_index, turn, self._replica)
        result = await self._runner.generate(request, context)
        stats = self.stats
        stats.generate_seconds.append(result.seconds)
        stats.continued += result.lost_replicas > 0
        stats.cut += result.cut
        return result

    async def judge(self, result: GenerateResult, turns: Sequence[Turn] = ()) -> RewardOutcome | None:
        """See `AgentContext.judge`."""
        if defect(result):
            return None
        text = await self._runner.decoder.text(result.response_ids)
        started = time.monotonic()
        reward_input = self.prompt.reward_input(text, result.response_ids, result.finish_reason)
        if turns:
            reward_input = changed(reward_input, turns=tuple(turns))
        outcome: RewardOutcome = await self._runner.rewards.score(reward_input, self.prompt.reward)
        stats, ended = self.stats, time.monotonic()
        stats.reward_seconds.append(ended - started)
        self.times.add("reward", ended - started)
        events.record(
            "reward", started, ended, group=self.group_id, sample=self.sample_index,
            args={"error": int(outcome.error is not None)},
        )  # fmt: skip
        if outcome.error is not None:
            stats.reward_errors[outcome.reason or "error"] += 1  # the pool reports them
        stats.rewards_redone += outcome.redone
        return outcome
