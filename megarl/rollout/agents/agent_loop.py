"""The protocols of an agent loop and of the context that it runs in."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardOutcome
from megarl.rollout.prompts import Drawn
from megarl.rollout.requests import GenerateResult


class AgentContext(Protocol):
    """One sample of one prompt group, and the services that its loop may use."""

    group_id: int
    sample_index: int
    prompt: Drawn

    @property
    def rng(self) -> random.Random:
        """Seeded by the run's seed, the group and the sample: a loop that draws from nothing else is reproducible."""
        ...

    async def generate(self, token_ids: Sequence[int], *, max_tokens: int | None = None) -> GenerateResult:
        """Sample the model's continuation of `token_ids` with the sampling of the prompt's set.

        A response goes on elsewhere if its replica is lost. Raises RequestFailed if an engine refuses the request, and
        RolloutError if no replica is left, none has room within `timeouts.generate_s`, or its group is failed at its
        deadline.
        """
        ...

    async def judge(self, result: GenerateResult) -> RewardOutcome | None:
        """Score a response with the reward function; None if the response failed and is not scored."""
        ...


class AgentLoop(Protocol):
    """Turns a prompt into a trajectory. One object runs all samples at once: keep a sample's state inside `run`."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Generate, act and judge. The trajectory's token ids must be those that the engine received and produced."""
        ...
