"""The end of an agent's trajectory: its last turn is judged, and all turns become one row."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.queue.trajectory import FinishReason, Trajectory
from megarl.rewards.types import Turn
from megarl.rollout.agents.agent_loop import AgentContext
from megarl.rollout.agents.trajectory_builder import defect, dialogue_trajectory
from megarl.rollout.engine.messages import GenerateResult


async def finish(
    ctx: AgentContext,
    results: Sequence[GenerateResult],
    inserted: Sequence[Sequence[int]],
    turns: Sequence[Turn] = (),
    *,
    finish_reason: FinishReason | None = None,
    failure: str = "",
) -> Trajectory:
    """Return the trajectory of the model's turns `results`; `inserted[i]` are the tokens between turns i and i + 1.

    The last turn is judged, unless a turn is defect or there is a `failure`. `turns`: the whole dialogue, for reward
    functions that look at it. `finish_reason`: of the trajectory; default: that of the last turn.
    """
    failure = failure or next((found for result in results if (found := defect(result))), "")
    outcome = None if failure else await ctx.judge(results[-1], turns)
    return dialogue_trajectory(
        ctx.group_id,
        ctx.sample_index,
        ctx.prompt.ids,
        results,
        inserted,
        outcome,
        finish_reason=finish_reason or results[-1].finish_reason,
        failure=failure,
    )
