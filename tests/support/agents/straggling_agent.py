"""A loop of which the first sample of every eighth group never ends by itself."""

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.trajectory_builder import trajectory

SHORT = 12  # tokens of the others
STRAGGLERS = range(1, 10**6, 8)  # their groups


class StragglingAgent:
    """Answers once with few tokens. A straggler goes on asking for more, until its group fails at the deadline."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of the first answer."""
        result = await ctx.generate(ctx.prompt.ids, max_tokens=SHORT)
        while ctx.group_id in STRAGGLERS and ctx.sample_index == 0:
            await ctx.generate(ctx.prompt.ids)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, await ctx.judge(result))
