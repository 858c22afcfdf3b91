"""What an agent loop is, and what it is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from megarl.queue.trajectory import Trajectory
from megarl.rewards.types import RewardOutcome
from megarl.rollout.prompts import Drawn
from megarl.rollout.requests import GenerateResult


class AgentContext(Protocol):
    """One sample of one prompt group, and what its loop may ask for.

    `rng` is seeded by the run's seed, the group and the sample: a loop that draws from it alone repeats itself.
    """

    group_id: int
    sample_index: int
    prompt: Drawn
    rng: random.Random

    async def generate(self, token_ids: Sequence[int]) -> GenerateResult:
        """The model's continuation of `token_ids`, as the run's `sampling` section says.

        Raises RolloutError if no replica is left or the answer takes longer than `timeouts.generate_s`.
        """
        ...

    async def judge(self, result: GenerateResult) -> RewardOutcome | None:
        """The reward function's word on a response; None if the response is defective and was not judged."""
        ...


class AgentLoop(Protocol):
    """From a prompt to a trajectory. One object serves all samples at once: state belongs into `run`."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Generate, act and judge; the trajectory's token ids are those that the engine saw and produced."""
        ...
