"""The agent loop of single-turn tasks: one response to the prompt, scored once."""

from __future__ import annotations

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.trajectory_builder import trajectory


class SingleTurn:
    """Samples one response and scores it."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of one response."""
        result = await ctx.generate(ctx.prompt.ids)
        outcome = await ctx.judge(result)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, outcome)
