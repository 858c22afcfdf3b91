"""One response to the prompt, judged once."""

from __future__ import annotations

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.to_trajectory import trajectory


class SingleTurn:
    """The agent loop of problems with one answer."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        result = await ctx.generate(ctx.prompt.ids)
        outcome = await ctx.judge(result)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, outcome)
