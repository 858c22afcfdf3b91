"""The agent loop of demonstrations: the response is in the data, so no engine is asked and nothing is scored."""

from __future__ import annotations

from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext


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
