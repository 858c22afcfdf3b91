"""The group runner: runs the agent loop for each sample of a prompt group and measures it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from megarl.common.errors import first_exception
from megarl.config.schema import Config
from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardOutcome
from megarl.rewards.worker_pool import RewardPool
from megarl.rollout.agents.agent_loop import AgentLoop
from megarl.rollout.batch_decoder import BatchDecoder
from megarl.rollout.batch_stats import BatchStats
from megarl.rollout.batcher import Batcher
from megarl.rollout.group_deadline import GroupDeadline
from megarl.rollout.group_progress import BegunResponse, GroupProgress, RequestPlace
from megarl.rollout.prompts import Drawn, PromptSource
from megarl.rollout.requests import GenerateRequest, GenerateResult, request_seed
from megarl.rollout.to_trajectory import check_trajectory, defect, failed_trajectory


class GroupRunner:
    """Turns a group's prompt into its trajectories; `stats` collects the measurements of the current batch."""

    def __init__(
        self,
        config: Config,
        loop: AgentLoop,
        source: PromptSource,
        batcher: Batcher,
        rewards: RewardPool,
        *,
        partition: str,
    ) -> None:
        """`partition` makes the request ids of this attempt of the run unique."""
        self.config = config
        self.loop = loop
        self.source = source
        self.batcher = batcher
        self.rewards = rewards
        self.decoder = BatchDecoder(source.decode_all)
        self.partition = partition
        self.stats = BatchStats()
        self.progress: dict[int, GroupProgress] = {}  # of the groups that are running

    async def run(self, group_id: int, kept: Mapping[RequestPlace, BegunResponse] | None = None) -> list[Trajectory]:
        """Return the group's trajectories in sample order. Raises the exception of the first loop that fails.

        `kept`: responses of an attempt before, which are continued.
        """
        prompt = self.source.draw(group_id)
        self.progress[group_id] = GroupProgress(prompt.ids, prompt.dataset, kept)
        try:
            return await self._run(group_id, prompt)
        finally:
            self.progress.pop(group_id)

    async def _run(self, group_id: int, prompt: Drawn) -> list[Trajectory]:
        deadline = GroupDeadline.of(self.config.rollout, time.monotonic())
        samples = range(self.config.batch.samples_per_group)
        try:
            async with asyncio.TaskGroup() as tasks:  # the first failure cancels the others
                running = [
                    tasks.create_task(self.loop.run(SampleContext(self, prompt, group_id, index, deadline)))
                    for index in samples
                ]
        except BaseExceptionGroup as group:
            raise first_exception(group) from None
        rows = [task.result() for task in running]
        for index, row in enumerate(rows):
            check_trajectory(row, group_id, index)
        return _of_set(rows, prompt.dataset)

    def failed(self, group_id: int, reason: str) -> list[Trajectory]:
        """Return the trajectories of a group that could not be run: without tokens, counted, never trained on."""
        rows = [failed_trajectory(group_id, index, reason) for index in range(self.config.batch.samples_per_group)]
        return _of_set(rows, self.source.dataset(group_id))


def _of_set(rows: list[Trajectory], dataset: str) -> list[Trajectory]:
    """Return the trajectories with the name of their data set; there is none if the run has only one."""
    return [replace(row, dataset=dataset) for row in rows] if dataset else rows


class SampleContext:
    """Implements `AgentContext` for one sample."""

    def __init__(
        self, runner: GroupRunner, prompt: Drawn, group_id: int, sample_index: int, deadline: GroupDeadline | None
    ) -> None:
        self.prompt, self.group_id, self.sample_index = prompt, group_id, sample_index
        self._runner, self._deadline = runner, deadline
        self._progress = runner.progress[group_id]
        self._turns = 0

    @cached_property
    def rng(self) -> random.Random:
        """See `AgentContext.rng`. Made when it is first used, because most loops use none."""
        return random.Random(self._seed(0))

    def _seed(self, turn: int) -> int:
        return request_seed(self._runner.config.run.seed, self.group_id, self.sample_index, turn)

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> GenerateResult:
        """See `AgentContext.generate`."""
        turn, self._turns = self._turns, self._turns + 1
        sampling = self.prompt.sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=min(max_tokens, sampling.max_tokens))
        request = GenerateRequest(
            request_id=f"{self._runner.partition}-{self.group_id}-{self.sample_index}-{turn}",
            prompt_ids=list(token_ids),
            sampling=sampling,
            seed=self._seed(turn),
        )
        home = self.group_id if self._runner.config.run.deterministic else None
        self._progress.begin(request, (self.sample_index, turn))
        result = await self._runner.batcher.generate(
            request, self.group_id, home, self._deadline, self._progress.tokens
        )
        stats = self._runner.stats  # read here, as in `judge`
        stats.generate_seconds.append(result.seconds)
        stats.continued += result.lost_replicas > 0
        stats.cut += result.cut
        return result

    async def judge(self, result: GenerateResult) -> RewardOutcome | None:
        """See `AgentContext.judge`."""
        if defect(result):
            return None
        text = await self._runner.decoder.text(result.response_ids)
        started = time.monotonic()
        reward_input = self.prompt.reward_input(text, result.response_ids, result.finish_reason)
        outcome: RewardOutcome = await self._runner.rewards.score(reward_input, self.prompt.reward)
        stats = self._runner.stats  # read here: meanwhile a batch may have been taken, and its statistics replaced
        stats.reward_seconds.append(time.monotonic() - started)
        if outcome.error is not None:
            stats.reward_errors[outcome.reason or "error"] += 1  # the pool reports them
        stats.rewards_redone += outcome.redone
        return outcome
