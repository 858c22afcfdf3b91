"""Finds the agent loop that a config names."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from megarl.common.imports import imported
from megarl.common.trust.secret_references import resolved
from megarl.config.schema.agent import HARNESS, SINGLE_TURN, TOOL_AGENT, AgentConfig
from megarl.queue.trajectory import Trajectory
from megarl.rollout.agents.agent_loop import AgentContext, AgentLoop
from megarl.rollout.agents.tool_agent import ToolAgent
from megarl.rollout.agents.trajectory_builder import trajectory

# The agent loop of single-turn tasks: one response to the prompt, scored once.


class SingleTurn:
    """Samples one response and scores it."""

    async def run(self, ctx: AgentContext) -> Trajectory:
        """Return the trajectory of one response."""
        result = await ctx.generate(ctx.prompt.ids)
        outcome = await ctx.judge(result)
        return trajectory(ctx.group_id, ctx.sample_index, ctx.prompt.ids, result, outcome)


def find_loop(agent: AgentConfig) -> AgentLoop:
    """Return the loop `single_turn`, `tool_agent`, `harness`, or an instance of the class `package.module:Class`.

    Raises ValueError that tells what is wrong with the path, the arguments or the class.
    """
    if agent.loop in (SINGLE_TURN, TOOL_AGENT):
        return SingleTurn() if agent.loop == SINGLE_TURN else ToolAgent()
    if agent.loop == HARNESS:
        # A layer above this one, found like a loop of the user's.
        made: Any = importlib.import_module("megarl.environments.harness_loop").Harness.of(agent)
        return cast(AgentLoop, made)
    found: Any = imported(agent.loop, "agent.loop:")
    if not inspect.isclass(found) or not inspect.iscoroutinefunction(getattr(found, "run", None)):
        raise ValueError(f"agent.loop: {agent.loop!r} must be a class with a method `async def run(self, ctx)`")
    try:
        made = found(**resolved(agent.kwargs, "agent.kwargs"))
    except TypeError as error:
        raise ValueError(f"agent.loop: {agent.loop!r} cannot be made with agent.kwargs: {error}") from error
    except ValueError:  # it says itself which argument is wrong
        raise
    except Exception as error:
        raise ValueError(f"agent.loop: {agent.loop!r} failed with {type(error).__name__}: {error}") from error
    loop: AgentLoop = made
    return loop
