"""The quickstart's loss and agent loop, until an order of the soak (chaos/orders.py) comes.

After it, the gradient of one micro-batch is NaN on one rank, or the last log-prob of one response is; or the agent loop
floods the output of its worker. While the order SLOWER is there, each micro-batch takes longer.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from benchmarks.chaos.kinds import FLOODED
from benchmarks.chaos.orders import SLOWER, take
from megarl.algorithms.interface.token_loss import TokenInputs, TokenLoss
from megarl.algorithms.losses import PPOOptions, ppo
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.agents.trajectory_builder import trajectory

if TYPE_CHECKING:
    from torch import Tensor

SLOWER_S = 1.5  # beyond what a micro-batch takes
FLOOD_LINES = ["x" * 2**16] * 512  # 32 MiB: the log's bound is that of another test, and the disk may be a small one


class OrderedOptions(PPOOptions):
    """Those of PPO, and where orders are given."""

    orders: str = Field(description="The directory of the orders.")


def ordered_ppo(inputs: TokenInputs, options: OrderedOptions) -> TokenLoss:
    """Return the loss of `ppo`; after the order `gradient` the gradient of its log-probs is NaN, on this rank alone.

    While the order SLOWER is there, it returns SLOWER_S later.
    """
    if (Path(options.orders) / SLOWER).exists():
        time.sleep(SLOWER_S)
    if inputs.logprobs_R.requires_grad and inputs.logprobs_R.numel() and take(Path(options.orders), "gradient"):
        inputs.logprobs_R.register_hook(_spoil)
    return ppo(inputs, options)


def _spoil(gradient_R: Tensor) -> Tensor:
    return gradient_R * math.nan


class OrderedTurn(SingleTurn):
    """A single turn; after the order `logprob` the last log-prob of one sample that is trained is NaN.

    After that of an agent worker it writes FLOOD_LINES to the worker's log before it asks for its response.
    """

    def __init__(self, orders: str) -> None:
        self._orders = Path(orders)

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of one response."""
        if take(self._orders, "flood-agent-worker"):
            for line in [*FLOOD_LINES, FLOODED]:
                print(line)
        result = await ctx.generate(ctx.prompt.ids)
        if ctx.trains and result.logprobs and take(self._orders, "logprob"):
            result = replace(result, logprobs=[*result.logprobs[:-1], math.nan])
        outcome = await ctx.judge(result)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, outcome)
