"""An agent loop whose rows have other prompts than the problems of their groups, as those of a harness."""

from dataclasses import replace

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.loop_host import SingleTurn
from megarl.rollout.agents.trajectory_builder import failed_trajectory


class Retokenized:
    """A loop of single turns. Sample 0 fails without a token; the prompts of the others have one token more."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        row = await SingleTurn().run(ctx)
        if ctx.sample_index == 0:
            return failed_trajectory(ctx.group_id, 0, "nothing was asked in the session")
        return replace(row, prompt_ids=[1, *row.prompt_ids])
