"""An agent loop that gets from its engine what a damaged one may return: log-probs that are not finite."""

import math
from collections.abc import Sequence
from dataclasses import replace

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.trajectory_builder import trajectory


class NanLogprobs:
    """A loop of single turns. The last log-prob is NaN in the groups of `steps`, of which each has `groups`.

    `samples`: the indices of the samples of which it is; None: all.
    """

    def __init__(self, steps: Sequence[int], groups: int, samples: Sequence[int] | None = None) -> None:
        self._steps, self._groups, self._samples = steps, groups, samples

    async def run(self, ctx: AgentContext) -> Trajectory:
        result = await ctx.generate(ctx.prompt.ids)
        if ctx.group_id // self._groups in self._steps and (self._samples is None or ctx.sample_index in self._samples):
            result = replace(result, logprobs=[*result.logprobs[:-1], math.nan])
        outcome = await ctx.judge(result)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, outcome)
